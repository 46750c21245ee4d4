"""Checkpoints that transformers writes: tiny configs, `save_pretrained`, small shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_size": 256,
}
QWEN = {"moe_intermediate_size": 192, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**COMMON, **QWEN, "num_hidden_layers": 2, "intermediate_size": 384},
    "qwen3_5_moe_text": {
        **COMMON,
        **QWEN,
        **LINEAR,
        "num_hidden_layers": 2,
        "shared_expert_intermediate_size": 128,
    },
    "granitemoe": {
        **COMMON,
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "llama4_text": {
        **COMMON,
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "intermediate_size_mlp": 384,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 32,
        "head_dim": 64,
    },
    "nemotron_h": {
        **COMMON,
        "head_dim": 64,
        "intermediate_size": 384,
        "moe_intermediate_size": 192,
        "moe_shared_expert_intermediate_size": 192,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 1,
        "chunk_size": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
}
"""Config keys by `model_type`; H is 256 and I is 192, so that a missing transpose shows."""


def write(kind: str, root: Path, max_shard_size: str) -> None:
    """Write the tiny checkpoint of a `model_type`, its weights seeded noise."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**KINDS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    model.save_pretrained(root, max_shard_size=max_shard_size)
