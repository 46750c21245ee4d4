"""LFM2-MoE: vLLM 0.33.0, `lfm2_moe.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import W1_W3_W2, Activation, Family, LayerRule, Routing

LFM2_MOE: Final = Family(
    name="lfm2-moe",
    model_types=("lfm2_moe",),
    publishers=("LiquidAI",),
    modules=("feed_forward.experts",),
    storages=(W1_W3_W2,),
    layers=LayerRule(first="num_dense_layers"),
    activation=Activation(fixed="silu"),
    routing=Routing("sigmoid"),
)
