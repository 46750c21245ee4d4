"""Ling and Ring V2.5 and V3: vLLM 0.33.0, `bailing_moe_linear.py`, `bailing_moe_v3.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, LayerRule, Routing

BAILING_HYBRID: Final = Family(
    name="bailing-hybrid",
    model_types=("bailing_hybrid", "bailing_moe_v2_5", "bailing_moe_v3_vl"),
    publishers=("inclusionAI",),
    layers=LayerRule(first="first_k_dense_replace"),
    routing=Routing(
        "sigmoid",
        scoring_keys=("score_function",),
        renormalise_keys=("norm_topk_prob", "moe_renormalize"),
        renormalise_default=True,
    ),
)
