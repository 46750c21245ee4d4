"""GraniteMoE: vLLM 0.33.0, `granitemoe.py`, `GraniteMoeModel.load_weights`.

Both projections are stacks in the MoE module itself, beside its router.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, Storage

GRANITE_MOE: Final = Family(
    name="granite-moe",
    model_types=("granitemoe", "granitemoeshared", "granitemoehybrid"),
    prefixes=("model.layers.{layer}.block_sparse_moe",),
    storages=(Storage((("gate_up", "input_linear"), ("down", "output_linear"))),),
    intermediate=("intermediate_size",),
    owns_prefix=False,
)
