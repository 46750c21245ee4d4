"""ERNIE-4.5-VL-MoE: vLLM 0.33.0, `ernie45_vl_moe.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, Routing

ERNIE_VL_MOE: Final = Family(
    name="ernie-vl-moe",
    model_types=("ernie4_5_vl_moe", "ernie4_5_vl_moe_text", "ernie4_5_moe_vl"),
    publishers=("baidu",),
    experts=("moe_num_experts",),
    routing=Routing(renormalise=True, biased=True),
    refusal=(
        "each layer numbers its text experts and its vision experts in one row, though the two "
        "differ in size, and moeconv writes one stack of equal experts a layer"
    ),
)
