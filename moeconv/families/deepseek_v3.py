"""DeepSeek-V3 to V3.2, Kimi-K2 to K2.6 and dots1: vLLM 0.33.0, `deepseek_v2.py`, `kimi_k25.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, LayerRule, Routing

DEEPSEEK_V3: Final = Family(
    name="deepseek-v3",
    model_types=("deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "dots1"),
    publishers=("deepseek-ai", "moonshotai", "nvidia"),
    layers=LayerRule(first="first_k_dense_replace", period="moe_layer_freq"),
    routing=Routing("sigmoid", scoring_keys=("scoring_func",)),
)
