"""Ling and Ring V1 and V2: vLLM 0.33.0, `bailing_moe.py`, `bailing_moe_linear.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, LayerRule, Routing

BAILING_MOE: Final = Family(
    name="bailing-moe",
    model_types=("bailing_moe", "bailing_moe_v2", "bailing_moe_linear"),
    publishers=("inclusionAI",),
    layers=LayerRule(first="first_k_dense_replace"),
    routing=Routing(scoring_keys=("score_function",)),
)
