"""Tiny MoE checkpoints, written by transformers itself: names and shapes that no one here chose.

One row for each model type that transformers 5.24 can write on a CPU; a row is data, and nothing
below the rows asks which family it is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

Config: TypeAlias = dict[str, Any]

_VL: Final = "AutoModelForImageTextToText"
_KEPT: Final = ("q_lora_rank",)
"""`None` means something else than absent."""


@dataclass(frozen=True)
class Sizes:
    """Every size differs from every other, so that a wrong axis shows."""

    hidden: int = 256
    intermediate: int = 192
    experts: int = 4
    layers: int = 2


@dataclass(frozen=True)
class Row:
    """What a model type's config is made of.

    `outer` are keys of a composite config around the text config, which lies at `text_key`.
    `rename` is the head of names that transformers writes, and of those that are published.
    """

    text: Config
    outer: Config = field(default_factory=dict)
    text_key: str = ""
    auto: str = "AutoModelForCausalLM"
    rename: tuple[str, str] = ("", "")


def per_layer(layers: int, *head: object, rest: object) -> list[object]:
    """An item a layer: `head` first, then `rest`."""
    return [*head, *[rest] * layers][:layers]


def cycle(layers: int, *values: object) -> list[object]:
    """An item a layer, the values in turn."""
    return [values[i % len(values)] for i in range(layers)]


def rows(s: Sizes) -> dict[str, Row]:
    """The rows, by model type; a `+` adds keys to another row."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    base = {  # what nearly every text config knows
        "vocab_size": 256,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    head = {"head_dim": 64}
    mla = {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    }
    dsa = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 2}
    qwen = {
        "intermediate_size": 2 * s.intermediate,
        "moe_intermediate_size": s.intermediate,
        "num_experts": s.experts,
        "num_experts_per_tok": 2,
    }
    deepseek = {
        "intermediate_size": 2 * s.intermediate,
        "moe_intermediate_size": s.intermediate,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    mixtral = {
        "intermediate_size": s.intermediate,
        "num_local_experts": s.experts,
        "num_experts_per_tok": 2,
    }
    gdn = {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": cycle(s.layers, "linear_attention", "full_attention"),
    }
    granite_mamba = {
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_head": s.hidden // 4,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
    }
    qwen_vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": s.hidden,
        "num_position_embeddings": 16,
    }
    glm_vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 8,
        "image_size": 32,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": s.hidden,
    }
    small_ids = {"image_token_id": 10, "video_token_id": 11}

    table = {
        "qwen2_moe": Row(
            {
                **base,
                **qwen,
                "shared_expert_intermediate_size": s.intermediate,
                "mlp_only_layers": [0],
            }
        ),
        "qwen3_moe": Row({**base, **head, **qwen, "norm_topk_prob": True, "mlp_only_layers": [0]}),
        "qwen3_next": Row(
            {**base, **head, **qwen, **gdn, "shared_expert_intermediate_size": s.intermediate}
        ),
        "qwen3_5_moe": Row(
            {
                **base,
                **head,
                **qwen,
                **gdn,
                "intermediate_size": None,
                "shared_expert_intermediate_size": s.intermediate,
            },
            {**small_ids, "vision_config": qwen_vision},
            "text_config",
            auto=_VL,
        ),
        "qwen3_5_moe_text": Row(
            {
                **base,
                **head,
                **qwen,
                **gdn,
                "intermediate_size": None,
                "shared_expert_intermediate_size": s.intermediate,
            }
        ),
        "qwen3_vl_moe": Row(
            {
                **base,
                **head,
                **qwen,
                "mlp_only_layers": [0],
                "rope_parameters": {**rope, "mrope_section": [12, 10, 10]},
            },
            {**small_ids, "vision_config": {**qwen_vision, "deepstack_visual_indexes": [0]}},
            "text_config",
            auto=_VL,
        ),
        "mixtral": Row({**base, **head, **mixtral}),
        "phimoe": Row({**base, **mixtral}),
        "deepseek_v2": Row(
            {**base, **deepseek, **mla, "first_k_dense_replace": 1, "n_shared_experts": 2}
        ),
        "deepseek_v3": Row({**base, **deepseek, **mla, "first_k_dense_replace": 1}),
        "deepseek_v32": Row({**base, **deepseek, **mla, **dsa, "first_k_dense_replace": 1}),
        "deepseek_v4": Row(
            {
                **base,
                "moe_intermediate_size": s.intermediate,
                "n_routed_experts": s.experts,
                "num_experts_per_tok": 2,
                "num_key_value_heads": 1,
                "head_dim": 64,
                "q_lora_rank": 32,
                "o_groups": 2,
                "o_lora_rank": 32,
                **dsa,
                "sliding_window": 32,
                "hc_mult": 2,
                "layer_types": cycle(
                    s.layers, "heavily_compressed_attention", "compressed_sparse_attention"
                ),
                "mlp_layer_types": per_layer(s.layers, "hash_moe", rest="moe"),
            }
        ),
        "glm4_moe": Row({**base, **head, **deepseek, "first_k_dense_replace": 1}),
        "glm4_moe_lite": Row(
            {
                **base,
                **deepseek,
                **mla,
                "mlp_layer_types": per_layer(s.layers, "dense", rest="sparse"),
            }
        ),
        "glm4v_moe": Row(
            {
                **base,
                **head,
                **deepseek,
                "first_k_dense_replace": 1,
                "rope_parameters": {
                    **rope,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [8, 4, 4],
                },
            },
            {**small_ids, "vision_config": glm_vision},
            "text_config",
            auto=_VL,
        ),
        "glm_moe_dsa": Row({**base, **deepseek, **mla, **dsa, "first_k_dense_replace": 1}),
        "glm5_next": Row(
            {
                **base,
                **deepseek,
                **mla,
                **dsa,
                "qk_rope_head_dim": 0,
                "linear_head_dim": 32,
                "linear_num_heads": 4,
                "hc_mult": 2,
                "index_kpool": 4,
                "layer_types": cycle(s.layers, "linear_attention", "indexed_attention"),
                "indexer_types": per_layer(s.layers, rest="full"),
                "mlp_layer_types": per_layer(s.layers, "dense", rest="sparse"),
            },
            {**small_ids, "vision_config": {**glm_vision, "projection_intermediate_size": 64}},
            "text_config",
            auto=_VL,
        ),
        "kimi_k25": Row(
            {"model_type": "deepseek_v3", **base, **deepseek, **mla, "first_k_dense_replace": 1},
            {
                **small_ids,
                "projection_hidden_size": 64,
                "tie_word_embeddings": False,
                "vision_config": {
                    "hidden_size": 64,
                    "intermediate_size": 64,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "patch_size": 8,
                    "pos_emb_height": 4,
                    "pos_emb_width": 4,
                },
            },
            "text_config",
            auto=_VL,
            rename=("language_model.model.blocks.", "language_model.model.layers."),
        ),
        "kimi_linear": Row(
            {
                **base,
                **mla,
                "q_lora_rank": None,
                "intermediate_size": 2 * s.intermediate,
                "moe_intermediate_size": s.intermediate,
                "num_local_experts": s.experts,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
                "linear_head_dim": 32,
                "linear_num_heads": 4,
                "mlp_layer_types": per_layer(s.layers, "dense", rest="sparse"),
                "layer_types": cycle(s.layers, "linear_attention", "full_attention"),
            }
        ),
        "minimax": Row(
            {
                **base,
                **head,
                **mixtral,
                "layer_types": cycle(s.layers, "full_attention", "linear_attention"),
            }
        ),
        "minimax_m2": Row({**base, **head, **mixtral}),
        "minimax_m3_vl": Row(
            {
                **base,
                **head,
                **mixtral,
                "dense_intermediate_size": 2 * s.intermediate,
                "shared_intermediate_size": s.intermediate,
                "rotary_dim": 32,
                "index_n_heads": 2,
                "index_head_dim": 32,
                "index_block_size": 16,
                "index_topk_blocks": 2,
                "mlp_layer_types": per_layer(s.layers, "dense", rest="sparse"),
                "layer_types": cycle(s.layers, "full_attention", "minimax_m3_sparse"),
            },
            {
                "image_token_index": 10,
                "video_token_index": 11,
                "projector_hidden_size": 64,
                "vision_config": {
                    "hidden_size": 96,
                    "intermediate_size": 64,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "image_size": 32,
                    "patch_size": 8,
                },
            },
            "text_config",
            auto=_VL,
        ),
        "gpt_oss": Row(
            {
                **base,
                **head,
                **mixtral,
                "sliding_window": 32,
                "rope_parameters": rope,
                "layer_types": cycle(s.layers, "sliding_attention", "full_attention"),
            }
        ),
        "olmoe": Row(
            {
                **base,
                "intermediate_size": s.intermediate,
                "num_experts": s.experts,
                "num_experts_per_tok": 2,
            }
        ),
        "flex_olmo": Row(
            {
                **base,
                "intermediate_size": s.intermediate,
                "num_experts": s.experts,
                "num_experts_per_tok": 2,
            }
        ),
        "granitemoe": Row({**base, **mixtral}),
        "granitemoe_swa": Row({**base, **mixtral}),
        "granitemoeshared": Row({**base, **mixtral, "shared_intermediate_size": s.intermediate}),
        "granitemoehybrid": Row(
            {
                **base,
                **mixtral,
                **granite_mamba,
                "shared_intermediate_size": s.intermediate,
                "layer_types": cycle(s.layers, "linear_attention", "full_attention"),
            }
        ),
        "ernie4_5_moe": Row(
            {
                **base,
                "intermediate_size": 2 * s.intermediate,
                "moe_intermediate_size": s.intermediate,
                "moe_num_experts": s.experts,
                "moe_k": 2,
                "moe_num_shared_experts": 2,
                "moe_layer_start_index": 1,
                "moe_layer_end_index": -1,
                "moe_layer_interval": 1,
            }
        ),
        "ernie4_5_vl_moe": Row(
            {
                **base,
                "num_attention_heads": s.hidden // 64,
                "intermediate_size": 2 * s.intermediate,
                "moe_intermediate_size": [s.intermediate, s.intermediate // 2],
                "moe_num_experts": s.experts,
                "moe_k": 2,
                "moe_num_shared_experts": 2,
                "mlp_layer_types": per_layer(s.layers, "dense", rest="sparse"),
                "rope_parameters": {**rope, "mrope_section": [11, 11, 10]},
            },
            {
                **small_ids,
                "image_start_token_id": 12,
                "image_end_token_id": 13,
                "video_start_token_id": 14,
                "video_end_token_id": 15,
                "vision_config": {
                    "depth": 1,
                    "hidden_size": 64,
                    "intermediate_size": 64,
                    "num_heads": 2,
                    "patch_size": 8,
                },
            },
            "text_config",
            auto=_VL,
        ),
        "bailing_hybrid": Row(
            {
                **base,
                **mla,
                "q_lora_rank": None,
                "intermediate_size": 2 * s.intermediate,
                "moe_intermediate_size": s.intermediate,
                "num_local_experts": s.experts,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "head_dim": 32,
                "layer_group_size": 2,
            }
        ),
        "lfm2_moe": Row(
            {
                **base,
                "intermediate_size": 2 * s.intermediate,
                "moe_intermediate_size": s.intermediate,
                "num_experts": s.experts,
                "num_experts_per_tok": 2,
                "num_dense_layers": 1,
                "conv_L_cache": 3,
                "layer_types": cycle(s.layers, "conv", "full_attention"),
            }
        ),
        "afmoe": Row(
            {
                **base,
                **head,
                "intermediate_size": 2 * s.intermediate,
                "moe_intermediate_size": s.intermediate,
                "num_experts": s.experts,
                "num_experts_per_tok": 2,
                "num_shared_experts": 1,
                "num_dense_layers": 1,
                "sliding_window": 32,
                "layer_types": cycle(s.layers, "sliding_attention", "full_attention"),
            }
        ),
        "nemotron_h": Row(
            {
                **base,
                "num_hidden_layers": None,
                "head_dim": 64,
                "intermediate_size": 2 * s.intermediate,
                "moe_intermediate_size": s.intermediate,
                "moe_shared_expert_intermediate_size": s.intermediate,
                "n_routed_experts": s.experts,
                "num_experts_per_tok": 2,
                "ssm_state_size": 16,
                "mamba_num_heads": 8,
                "mamba_head_dim": s.hidden // 4,
                "n_groups": 1,
                "chunk_size": 16,
                "layers_block_type": cycle(
                    max(4, s.layers), "linear_attention", "moe", "full_attention", "mlp"
                ),
            }
        ),
        "llama4": Row(
            {
                **base,
                **head,
                "intermediate_size": s.intermediate,
                "intermediate_size_mlp": 2 * s.intermediate,
                "num_local_experts": s.experts,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 32,
            },
            {
                "image_token_index": 10,
                "boi_token_index": 11,
                "eoi_token_index": 12,
                "vision_config": {
                    "hidden_size": 64,
                    "intermediate_size": 256,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "image_size": 32,
                    "patch_size": 8,
                    "vision_output_dim": 64,
                    "projector_input_dim": 64,
                    "projector_output_dim": 64,
                },
            },
            "text_config",
            auto=_VL,
        ),
        "llama4_text": Row(
            {
                **base,
                **head,
                "intermediate_size": s.intermediate,
                "intermediate_size_mlp": 2 * s.intermediate,
                "num_local_experts": s.experts,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 32,
            }
        ),
        "jamba": Row(
            {
                **base,
                "intermediate_size": s.intermediate,
                "num_experts": s.experts,
                "num_experts_per_tok": 2,
                "expert_layer_period": 2,
                "expert_layer_offset": 1,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "mamba_d_state": 8,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
                "mamba_dt_rank": 16,
                "use_mamba_kernels": False,
            }
        ),
        "dots1": Row(
            {**base, **deepseek, **head, "first_k_dense_replace": 1, "norm_topk_prob": True}
        ),
        "hunyuan_v1_moe": Row(
            {
                **base,
                **head,
                "intermediate_size": s.intermediate,
                "num_experts": s.experts,
                "moe_topk": 2,
            }
        ),
        "hy_v3": Row(
            {
                **base,
                **head,
                "intermediate_size": 2 * s.intermediate,
                "moe_intermediate_size": s.intermediate,
                "num_experts": s.experts,
                "num_experts_per_tok": 2,
                "num_shared_experts": 1,
                "mlp_layer_types": per_layer(s.layers, "dense", rest="sparse"),
            }
        ),
        "exaone_moe": Row(
            {
                **base,
                **head,
                "intermediate_size": 2 * s.intermediate,
                "moe_intermediate_size": s.intermediate,
                "num_experts": s.experts,
                "num_experts_per_tok": 2,
                "num_shared_experts": 1,
                "first_k_dense_replace": 1,
                "sliding_window": 32,
                "sliding_window_pattern": 2,
            }
        ),
        "longcat_flash": Row(
            {
                **base,
                **mla,
                "num_hidden_layers": None,
                "num_layers": s.layers,
                "ffn_hidden_size": 2 * s.intermediate,
                "expert_ffn_hidden_size": s.intermediate,
                "n_routed_experts": s.experts,
                "zero_expert_num": 2,
                "moe_topk": 2,
            }
        ),
        "step3p7": Row(
            {
                **base,
                **head,
                "intermediate_size": 2 * s.intermediate,
                "moe_intermediate_size": s.intermediate,
                "n_routed_experts": s.experts,
                "num_experts_per_tok": 2,
                "share_expert_dim": s.intermediate,
                "mlp_layer_types": per_layer(s.layers, "dense", rest="sparse"),
                "layer_types": cycle(s.layers, "full_attention", "sliding_attention"),
                "sliding_window": 32,
                "num_sliding_attention_heads": 4,
            },
            {
                "image_token_id": 10,
                "vision_config": {
                    "hidden_size": 64,
                    "intermediate_size": 64,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "image_size": 32,
                    "patch_size": 8,
                    "mlp_ratio": 2.0,
                    "max_position_embeddings": 16,
                },
            },
            "text_config",
            auto=_VL,
        ),
        "aria": Row(
            {
                **base,
                **head,
                "intermediate_size": s.intermediate,
                "moe_num_experts": s.experts,
                "moe_topk": 2,
                "moe_num_shared_experts": 1,
            },
            {
                "max_value_projector_patch_to_query_dict": 16,
                "projector_patch_to_query_dict": {16: 16},
                "vision_config": {
                    "model_type": "idefics3_vision",
                    "hidden_size": 64,
                    "intermediate_size": 64,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "image_size": 32,
                    "patch_size": 8,
                },
            },
            "text_config",
            auto=_VL,
        ),
        "aria_text": Row(
            {
                **base,
                **head,
                "intermediate_size": s.intermediate,
                "moe_num_experts": s.experts,
                "moe_topk": 2,
                "moe_num_shared_experts": 1,
            }
        ),
        "qwen3_omni_moe_thinker": Row(
            {
                **base,
                **head,
                **qwen,
                "mlp_only_layers": [0],
                "rope_parameters": {**rope, "mrope_section": [12, 10, 10]},
            },
            {
                "image_token_id": 10,
                "video_token_id": 11,
                "audio_token_id": 12,
                "vision_config": {**qwen_vision, "deepstack_visual_indexes": [0]},
                "audio_config": {
                    "d_model": 64,
                    "encoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 64,
                    "num_mel_bins": 16,
                    "output_dim": s.hidden,
                    "downsample_hidden_size": 16,
                    "max_source_positions": 32,
                },
            },
            "text_config",
            auto="Qwen3OmniMoeThinkerForConditionalGeneration",
        ),
    }
    latent = {**table["nemotron_h"].text, "moe_latent_size": s.hidden // 2}
    return {**table, "nemotron_h+latent": Row(latent)}


MODEL_TYPES: Final = tuple(rows(Sizes()))


def config(name: str, sizes: Sizes) -> Any:
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    row = rows(sizes)[name]
    text = {key: value for key, value in row.text.items() if value is not None or key in _KEPT}
    kwargs = {**row.outer, row.text_key: text} if row.text_key else text
    model_type = name.partition("+")[0]
    # the thinker is registered only as part of the whole omni model
    known = {**CONFIG_MAPPING, "qwen3_omni_moe_thinker": Thinker.config_class}
    return known[model_type](**kwargs)


def build(name: str, sizes: Sizes, seed: int = 0) -> Any:
    """Make the model in BF16 on the CPU, every float parameter seeded noise."""
    import torch
    import transformers

    cls = getattr(transformers, rows(sizes)[name].auto)
    make = getattr(cls, "from_config", None) or cls._from_config
    torch.manual_seed(seed)
    model = make(config(name, sizes), dtype=torch.bfloat16).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, param in sorted(model.named_parameters()):
            if param.is_floating_point():
                param.copy_(torch.randn(param.shape, generator=rng) * 0.05)
    return model


def write(name: str, root: Path, sizes: Sizes | None = None, *, shard_size: str = "1MB") -> Any:
    """Write a checkpoint and return the model that was saved."""
    sizes = sizes or Sizes()
    model = build(name, sizes)
    model.save_pretrained(root, max_shard_size=shard_size)
    _rename(root, *rows(sizes)[name].rename)
    return model


def _rename(root: Path, old: str, new: str) -> None:
    from safetensors.torch import load_file, save_file

    if not old:
        return
    for shard in sorted(root.glob("*.safetensors")):
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in load_file(shard).items()
        }
        save_file(tensors, shard, metadata={"format": "pt"})
    index = root / "model.safetensors.index.json"
    if index.exists():
        index.write_text(index.read_text().replace(f'"{old}', f'"{new}'))


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
