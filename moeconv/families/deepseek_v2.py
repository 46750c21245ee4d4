"""DeepSeek-V2: vLLM 0.33.0, `deepseek_v2.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, LayerRule, Routing

DEEPSEEK_V2: Final = Family(
    name="deepseek-v2",
    model_types=("deepseek_v2",),
    publishers=("deepseek-ai",),
    layers=LayerRule(first="first_k_dense_replace", period="moe_layer_freq"),
    routing=Routing(scoring_keys=("scoring_func",), renormalise_default=False),
)
