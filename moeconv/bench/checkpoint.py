"""A checkpoint to measure with: a model's experts in random bytes, of about the size asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from moeconv.output.shard import arrange
from moeconv.tensors import TensorSpec

if TYPE_CHECKING:
    from moeconv.bench.shapes import Shape

_SHARD_BYTES: Final = 2 * 10**9
_NOISE_BYTES: Final = 1 << 26
_SCALE_BYTES: Final = (0x30, 0x70)
"""E4M3 block scales from 0.5 to 128: none is lost, as in a checkpoint that is sound."""


def write_checkpoint(root: Path, scheme: str, shape: Shape, size_bytes: int) -> int:
    """Write a Qwen3-MoE checkpoint and return the bytes of its weights.

    Parameters
    ----------
    root
        The directory, made here.
    scheme
        `bf16` or `modelopt-nvfp4`.
    shape
        Sizes of the experts. A layer has fewer experts if it would be larger than the checkpoint.
    size_bytes
        About how large.

    Raises
    ------
    OSError
        The disk is full or cannot be written.
    """
    rng = np.random.default_rng(7)
    noise = {
        "": rng.integers(0, 256, _NOISE_BYTES, np.uint8).tobytes(),
        "F8_E4M3": rng.integers(*_SCALE_BYTES, _NOISE_BYTES, np.uint8).tobytes(),
        "F32": np.full(1, 2.0**-8, np.float32).tobytes(),
    }
    expert = sum(spec.nbytes for _, spec in _expert(scheme, shape))
    experts = max(2, min(shape.experts, size_bytes // expert))
    layers = max(1, round(size_bytes / (experts * expert)))
    root.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(_shards(scheme, shape, layers, experts)):
        file = f"model-{number + 1:05}.safetensors"
        layout = arrange(tensors, {"format": "pt"})
        with (root / file).open("wb") as out:
            out.write(layout.header)
            for entry in layout.entries:
                data = noise.get(entry.spec.dtype, noise[""])
                for at in range(0, entry.spec.nbytes, len(data)):
                    out.write(memoryview(data)[: entry.spec.nbytes - at])
        weight_map |= dict.fromkeys(tensors, file)
        total += layout.size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.intermediate,
    }
    (root / "config.json").write_text(json.dumps(config))
    return total


def _shards(
    scheme: str, shape: Shape, layers: int, experts: int
) -> Iterator[dict[str, TensorSpec]]:
    """Yield the tensors of each file, an expert after the other."""
    tensors: dict[str, TensorSpec] = {}
    size = 0
    for layer in range(layers):
        for number in range(experts):
            prefix = f"model.layers.{layer}.mlp.experts.{number}"
            tensors |= {f"{prefix}.{name}": spec for name, spec in _expert(scheme, shape)}
            size += sum(spec.nbytes for _, spec in _expert(scheme, shape))
            if size >= _SHARD_BYTES:
                yield tensors
                tensors, size = {}, 0
    tensors["model.norm.weight"] = TensorSpec("BF16", (shape.hidden,))
    yield tensors


def _expert(scheme: str, shape: Shape) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the tensors of one expert."""
    projections = {
        "gate_proj": (shape.intermediate, shape.hidden),
        "up_proj": (shape.intermediate, shape.hidden),
        "down_proj": (shape.hidden, shape.intermediate),
    }
    for name, (rows, cols) in projections.items():
        if scheme == "bf16":
            yield f"{name}.weight", TensorSpec("BF16", (rows, cols))
            continue
        yield f"{name}.weight", TensorSpec("U8", (rows, cols // 2))
        yield f"{name}.weight_scale", TensorSpec("F8_E4M3", (rows, math.ceil(cols / 16)))
        yield f"{name}.weight_scale_2", TensorSpec("F32", ())
