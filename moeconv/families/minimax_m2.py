"""MiniMax-M2: vLLM 0.33.0, `minimax_m2.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import W1_W3_W2, Family, Routing

MINIMAX_M2: Final = Family(
    name="minimax-m2",
    model_types=("minimax_m2",),
    publishers=("MiniMaxAI",),
    modules=("block_sparse_moe.experts",),
    storages=(W1_W3_W2,),
    routing=Routing("sigmoid", scoring_keys=("scoring_func",), renormalise=True),
)
