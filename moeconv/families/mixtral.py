"""Mixtral and MiniMax-Text-01: vLLM 0.33.0, `mixtral.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import W1_W3_W2, Family, Routing

MIXTRAL: Final = Family(
    name="mixtral",
    model_types=("mixtral", "minimax"),
    publishers=("mistralai",),
    modules=("block_sparse_moe.experts",),
    storages=(W1_W3_W2,),
    routing=Routing(renormalise=True),
)
