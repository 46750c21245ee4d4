"""EXAONE-MoE: vLLM 0.33.0, `exaone_moe.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, LayerRule, Routing

EXAONE_MOE: Final = Family(
    name="exaone-moe",
    model_types=("exaone_moe",),
    publishers=("LGAI-EXAONE",),
    layers=LayerRule(first="first_k_dense_replace"),
    routing=Routing("sigmoid", scoring_keys=("scoring_func",), biased=True),
)
