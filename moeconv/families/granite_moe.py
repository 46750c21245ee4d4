"""GraniteMoE: vLLM 0.33.0, `granitemoe.py`, `GraniteMoeModel.load_weights`.

Both projections are stacks in the MoE module itself, beside its router; the sliding-window line
has them in a module of their own. The shared MLP has tensors of the same names elsewhere.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import STACKED, Family, Routing, Storage

GRANITE_MOE: Final = Family(
    name="granite-moe",
    model_types=("granitemoe", "granitemoe_swa", "granitemoeshared", "granitemoehybrid"),
    publishers=("ibm-granite",),
    modules=("block_sparse_moe.experts", "block_sparse_moe"),
    owns_module=False,
    storages=(Storage((("gate_up", "input_linear"), ("down", "output_linear"))), STACKED),
    intermediate=("intermediate_size",),
    routing=Routing(renormalise=True),
)
