"""Hunyuan V1 MoE: transformers 5.24, `hunyuan_v1_moe`, which vLLM 0.33.0 runs as its own backend.

Sizes are numbers or lists with one a layer.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, Routing

HUNYUAN_MOE: Final = Family(
    name="hunyuan-moe",
    model_types=("hunyuan_v1_moe",),
    publishers=("tencent",),
    routing=Routing(renormalise=True),
)
