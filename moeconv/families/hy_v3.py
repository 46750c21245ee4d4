"""HY-V3: vLLM 0.33.0, `hy_v3.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, LayerRule, Routing

HY_V3: Final = Family(
    name="hy-v3",
    model_types=("hy_v3",),
    publishers=("tencent",),
    layers=LayerRule(first="first_k_dense_replace"),
    routing=Routing(
        "sigmoid", renormalise_keys=("route_norm",), renormalise_default=True, biased=True
    ),
)
