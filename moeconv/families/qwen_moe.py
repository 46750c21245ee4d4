"""Qwen2-MoE to Qwen3-Next: vLLM 0.33.0, `qwen2_moe.py`, `qwen3_moe.py`, `qwen3_next.py`.

Of an omni model only the thinker is the main model; the talker's experts are left as they are.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import TEXT_ROOTS, Family, LayerRule

QWEN_MOE: Final = Family(
    name="qwen-moe",
    model_types=(
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_omni_moe",
        "qwen3_omni_moe_thinker",
        "qwen3_omni_moe_text",
    ),
    publishers=("Qwen", "nvidia"),
    roots=(*TEXT_ROOTS, "thinker.model.layers.{layer}"),
    layers=LayerRule(dense_list="mlp_only_layers", step="decoder_sparse_step"),
)
