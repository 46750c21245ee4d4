"""Write a small Qwen3-MoE checkpoint: random BF16 weights, the same bytes every time.

    python examples/make_checkpoint.py DIR

Gate, up and down projections land in three different shards, as they may in a real checkpoint.
Needs numpy only: numpy has no BF16, so the files are put together from their bits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

LAYERS, EXPERTS, TOP_K = 2, 8, 2
HIDDEN, INTERMEDIATE, HEADS, HEAD_SIZE, VOCABULARY = 256, 256, 4, 64, 512

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "moe_intermediate_size": INTERMEDIATE,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 1024,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of the model."""
    width = HEADS * HEAD_SIZE
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{prefix}.self_attn.{name}.weight", (width, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, width)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{name}.weight", (HEAD_SIZE,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", (HIDDEN,)
        yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (INTERMEDIATE, HIDDEN)
            yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", (INTERMEDIATE, HIDDEN)
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def shard(name: str) -> int:
    """Return the shard of a tensor: up and down projections apart, gate with all the rest."""
    return 2 if ".up_proj." in name else 3 if ".down_proj." in name else 1


def bfloat16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return the bits of random BF16 values; one-dimensional weights, the norms, are about one."""
    values = rng.normal(float(len(shape) == 1), 0.06, shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)  # the upper half of a float32


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file: the header's length, the header in JSON, then the data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, x in tensors.items():
        offsets = [at, at + x.nbytes]
        header[name] = {"dtype": "BF16", "shape": x.shape, "data_offsets": offsets}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(x.tobytes() for x in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def main(root: Path) -> None:
    """Write the checkpoint."""
    rng = np.random.default_rng(20)
    shards: dict[int, dict[str, np.ndarray]] = {1: {}, 2: {}, 3: {}}
    for name, shape in shapes():
        shards[shard(name)][name] = bfloat16(rng, shape)
    root.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, tensors in shards.items():
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write(root / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(x.nbytes for tensors in shards.values() for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (root / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    print(f"{root}: {len(weight_map)} tensors, {total / 1e6:.1f} MB, {len(shards)} shards")


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
