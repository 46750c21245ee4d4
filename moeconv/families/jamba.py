"""Jamba: vLLM 0.33.0, `jamba.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, LayerRule, Routing

JAMBA: Final = Family(
    name="jamba",
    model_types=("jamba",),
    publishers=("ai21labs",),
    modules=("feed_forward.experts",),
    layers=LayerRule(period="expert_layer_period", offset="expert_layer_offset"),
    intermediate=("intermediate_size",),
    routing=Routing(renormalise=False),
)
