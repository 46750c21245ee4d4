"""Qwen's MoE lines: vLLM 0.33.0, `qwen2_moe.py`, `qwen3_moe.py`, `qwen3_next.py`, `qwen3_5.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, LayerRule

QWEN_MOE: Final = Family(
    name="qwen-moe",
    model_types=(
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    ),
    layers=LayerRule(dense_list="mlp_only_layers", step="decoder_sparse_step"),
)
