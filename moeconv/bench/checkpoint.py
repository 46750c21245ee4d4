"""A checkpoint to measure with: a model's experts in random bytes, of about the size asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from moeconv.output.shard import arrange
from moeconv.tensors import TensorSpec

if TYPE_CHECKING:
    from moeconv.bench.shapes import Shape

_SHARD_BYTES: Final = 2 * 10**9
_NOISE_BYTES: Final = 1 << 26
_SCALE_BYTES: Final = (0x30, 0x70)
"""E4M3 block scales from 0.5 to 128: none is lost, as in a checkpoint that is sound."""

_Tensors: TypeAlias = Iterator[tuple[str, TensorSpec]]


@dataclass(frozen=True, slots=True)
class Kind:
    """How a checkpoint keeps its experts.

    Attributes
    ----------
    model_type, experts_key, intermediate_key
        What its `config.json` says.
    tensors
        The tensors of one layer in file order, by shape and number of experts.
    """

    model_type: str
    experts_key: str
    intermediate_key: str
    tensors: Callable[[Shape, int], _Tensors]

    def config(self, shape: Shape, layers: int, experts: int) -> dict[str, object]:
        """Return its `config.json`."""
        return {
            "model_type": self.model_type,
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "norm_topk_prob": True,
            "num_hidden_layers": layers,
            "hidden_size": shape.hidden,
            self.experts_key: experts,
            self.intermediate_key: shape.intermediate,
        }


def _one_by_one(matrix: Callable[[int, int], _Tensors], shape: Shape, experts: int) -> _Tensors:
    """Yield an expert after the other, as most checkpoints keep them."""
    H, I = shape.hidden, shape.intermediate
    sizes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    for expert in range(experts):
        for projection, (rows, cols) in sizes.items():
            for suffix, spec in matrix(rows, cols):
                yield f"{expert}.{projection}.{suffix}", spec


def _bf16(rows: int, cols: int) -> _Tensors:
    yield "weight", TensorSpec("BF16", (rows, cols))


def _nvfp4(rows: int, cols: int) -> _Tensors:
    yield "weight", TensorSpec("U8", (rows, cols // 2))
    yield "weight_scale", TensorSpec("F8_E4M3", (rows, cols // 16))
    yield "weight_scale_2", TensorSpec("F32", ())


def _mxfp4(rows: int, cols: int) -> _Tensors:
    yield "weight", TensorSpec("U8", (rows, cols // 2))
    yield "weight_scale", TensorSpec("U8", (rows, cols // 32))


def _stacks(shape: Shape, experts: int) -> _Tensors:
    """Yield the stacks of all experts, as gpt-oss keeps them."""
    H, I = shape.hidden, shape.intermediate
    for projection, rows, cols in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        yield f"{projection}_blocks", TensorSpec("U8", (experts, rows, cols // 32, 16))
        yield f"{projection}_scales", TensorSpec("U8", (experts, rows, cols // 32))
        yield f"{projection}_bias", TensorSpec("BF16", (experts, rows))


_QWEN: Final = ("qwen3_moe", "num_experts", "moe_intermediate_size")

KINDS: Final = {
    "trtllm-bf16": Kind(*_QWEN, partial(_one_by_one, _bf16)),
    "marlin-nvfp4": Kind(*_QWEN, partial(_one_by_one, _nvfp4)),
    "marlin-mxfp4": Kind(*_QWEN, partial(_one_by_one, _mxfp4)),
    "marlin-mxfp4-gptoss": Kind("gpt_oss", "num_local_experts", "intermediate_size", _stacks),
}
"""The layouts that whole conversions are measured for, and what each of them is made of."""


def write_checkpoint(root: Path, kind: Kind, shape: Shape, size_bytes: int) -> int:
    """Write a checkpoint and return the bytes of its weights.

    Parameters
    ----------
    root
        The directory, made here.
    shape
        Sizes of the experts. A layer has fewer experts if it would be larger than the checkpoint.
    size_bytes
        About how large.

    Raises
    ------
    OSError
        The disk is full or cannot be written.
    """
    experts = max(2, min(shape.experts, size_bytes // _nbytes(kind, shape, 1)))
    layers = max(1, round(size_bytes / _nbytes(kind, shape, experts)))
    root.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = 0
    noise = _noise(min(size_bytes, _NOISE_BYTES))
    for number, tensors in enumerate(_shards(kind, shape, layers, experts)):
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
    (root / "config.json").write_text(json.dumps(kind.config(shape, layers, experts)))
    return total


def _noise(size: int) -> dict[str, bytes]:
    """Return random bytes that a tensor's are taken from, by its dtype."""
    rng = np.random.default_rng(7)
    return {
        "": rng.integers(0, 256, size, np.uint8).tobytes(),
        "F8_E4M3": rng.integers(*_SCALE_BYTES, size, np.uint8).tobytes(),
        "F32": np.full(1, 2.0**-8, np.float32).tobytes(),
    }


def _nbytes(kind: Kind, shape: Shape, experts: int) -> int:
    """Return the size of a layer."""
    return sum(spec.nbytes for _, spec in kind.tensors(shape, experts))


def _shards(kind: Kind, shape: Shape, layers: int, experts: int) -> Iterator[dict[str, TensorSpec]]:
    """Yield the tensors of each file."""
    tensors: dict[str, TensorSpec] = {}
    size = 0
    for layer in range(layers):
        for name, spec in kind.tensors(shape, experts):
            tensors[f"model.layers.{layer}.mlp.experts.{name}"] = spec
            size += spec.nbytes
            if size >= _SHARD_BYTES:
                yield tensors
                tensors, size = {}, 0
    tensors["model.norm.weight"] = TensorSpec("BF16", (shape.hidden,))
    yield tensors
