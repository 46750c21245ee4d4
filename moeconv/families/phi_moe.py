"""Phi-3.5-MoE: vLLM 0.33.0, `phimoe.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import W1_W3_W2, Family, Routing

PHI_MOE: Final = Family(
    name="phi-moe",
    model_types=("phimoe",),
    publishers=("microsoft",),
    modules=("block_sparse_moe.experts",),
    storages=(W1_W3_W2,),
    routing=Routing(renormalise=False, custom="sparsemixer"),
)
