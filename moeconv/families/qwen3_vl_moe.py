"""Qwen3-VL-MoE: vLLM 0.33.0, `qwen3_vl_moe.py`.

Published as stacks `[E, H, 2I]` and `[E, I, H]`; transformers 5.24 writes `[E, 2I, H]` and
`[E, H, I]` back under the same names.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import (
    GATE_UP_DOWN,
    STACKED,
    STACKED_TRANSPOSED,
    Family,
    LayerRule,
    Routing,
)

QWEN3_VL_MOE: Final = Family(
    name="qwen3-vl-moe",
    model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
    publishers=("Qwen",),
    storages=(STACKED_TRANSPOSED, STACKED, GATE_UP_DOWN),
    layers=LayerRule(dense_list="mlp_only_layers", step="decoder_sparse_step"),
    routing=Routing(renormalise=True),
)
