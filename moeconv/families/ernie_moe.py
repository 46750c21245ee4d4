"""ERNIE-4.5-MoE: vLLM 0.33.0, `ernie45_moe.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, LayerRule, Routing

ERNIE_MOE: Final = Family(
    name="ernie-moe",
    model_types=("ernie4_5_moe",),
    publishers=("baidu",),
    layers=LayerRule(
        first="moe_layer_start_index", last="moe_layer_end_index", step="moe_layer_interval"
    ),
    experts=("moe_num_experts",),
    routing=Routing(renormalise=True, biased=True),
)
