"""MiniMax-M3: vLLM 0.33.0, `vllm/models/minimax_m3/nvidia/model.py`.

Gate and up are halves, though the activation is the one of gpt-oss; transformers 5.24 writes
another one into the config.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import W1_W3_W2, Activation, Family, Routing

MINIMAX_M3: Final = Family(
    name="minimax-m3",
    model_types=("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3_text"),
    publishers=("MiniMaxAI",),
    modules=("block_sparse_moe.experts",),
    storages=(W1_W3_W2,),
    intermediate=("intermediate_size",),
    activation=Activation(fixed="swigluoai"),
    routing=Routing("sigmoid", renormalise=True),
)
