"""FP4 checkpoints of every kind, from the same numbers: each as its writers publish it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import xxhash

from tests.sources import write_checkpoint

if TYPE_CHECKING:
    from tests.sources import Tensor

Array: TypeAlias = np.ndarray
Change: TypeAlias = Callable[[dict[str, "Tensor"]], None]

PROJECTIONS: Final = ("gate", "up", "down")
NVFP4_KINDS: Final = ("modelopt", "ct")
KINDS: Final = ("modelopt", "ct", "mxfp4", "ct-mxfp4", "deepseek", "gptoss", "nemotron")


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix: codes `[rows, cols]`, scale bytes `[rows, groups]`, one global scale."""

    codes: Array
    scales: Array
    scale: np.float32

    @property
    def packed(self) -> Array:
        """Two codes a byte, the low nibble first."""
        both: Array = self.codes[:, 0::2] | self.codes[:, 1::2] << 4
        return both


@dataclass(frozen=True)
class Model:
    """A model whose experts are stored in FP4.

    `kind` is one of `KINDS`. `change_scales` gets (layer, expert, projection, scale bytes) and may
    change the bytes; `scales` are global scales by (layer, expert, projection) in place of 1/256.
    `bf16_layers` keep BF16 experts. `extra` and `config` are merged in last.
    """

    kind: str
    experts: int = 4
    hidden: int = 256
    intermediate: int = 256
    layers: int = 2
    input_scales: bool = True
    scale_dtype: str = ""
    weight_dtype: str = "U8"
    change_scales: Callable[[int, int, str, Array], None] | None = None
    scales: Mapping[tuple[int, int, str], float] = field(default_factory=dict)
    bf16_layers: tuple[int, ...] = ()
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_nvfp4(self) -> bool:
        """Whether groups are 16 and there are global scales."""
        return self.kind in {"modelopt", "ct", "nemotron"}

    @property
    def gated(self) -> bool:
        """Whether there is a gate."""
        return self.kind != "nemotron"

    @property
    def projections(self) -> tuple[str, ...]:
        """What an expert has."""
        return PROJECTIONS if self.gated else PROJECTIONS[1:]

    def matrix(self, layer: int, expert: int, projection: str) -> Matrix:
        """Return one matrix, by its name; the same for every kind of the same sizes and groups."""
        rows, cols = self.shape(projection)
        rng = np.random.default_rng(seed(layer, expert, projection))
        codes = rng.integers(0, 16, (rows, cols), np.uint8)
        group = 16 if self.is_nvfp4 else 32
        low, high = (8, 0x7F) if self.is_nvfp4 else (100, 128)
        scales = rng.integers(low, high, (rows, cols // group), np.uint8)
        if self.change_scales:
            self.change_scales(layer, expert, projection, scales)
        scale = np.float32(self.scales.get((layer, expert, projection), 1 / 256))
        return Matrix(codes, scales, scale)

    def shape(self, projection: str) -> tuple[int, int]:
        """Rows and columns."""
        size = (self.intermediate, self.hidden)
        return size[::-1] if projection == "down" else size

    def bias(self, layer: int, projection: str) -> Array:
        """Return the bits of BF16 biases, `[E, rows]`."""
        rng = np.random.default_rng(seed("bias", layer, projection))
        rows = self.shape(projection)[0]
        return rng.integers(0, 1 << 16, (self.experts, rows), np.uint16)

    def prefix(self, layer: int) -> str:
        """Module that holds the experts of a layer."""
        template = {
            "nemotron": "backbone.layers.{}.mixer.experts",
            "deepseek": "layers.{}.ffn.experts",
        }.get(self.kind, "model.layers.{}.mlp.experts")
        return template.format(layer)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, by name."""
        table: dict[str, Tensor] = {
            "model.norm.weight": ("BF16", (self.hidden,), bytes(2 * self.hidden))
        }
        for layer in range(self.layers):
            if layer in self.bf16_layers:
                table.update(self._bf16(layer))
            elif self.kind == "gptoss":
                table.update(self._stacks(layer))
            else:
                table.update(self._apart(layer))
        return {**table, **self.extra}

    def model_config(self) -> dict[str, Any]:
        """Return `config.json`."""
        model_type, experts, intermediate = {
            "nemotron": ("nemotron_h", "n_routed_experts", "moe_intermediate_size"),
            "deepseek": ("deepseek_v4", "n_routed_experts", "moe_intermediate_size"),
            "gptoss": ("gpt_oss", "num_local_experts", "intermediate_size"),
        }.get(self.kind, ("qwen3_moe", "num_experts", "moe_intermediate_size"))
        config: dict[str, Any] = {
            "model_type": model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "torch_dtype": "bfloat16",
            experts: self.experts,
            intermediate: self.intermediate,
        }
        if self.kind == "nemotron":
            config["layers_block_type"] = ["moe"] * self.layers
        config.update(self.config)
        return {key: value for key, value in config.items() if value is not None}

    def write(self, root: Path, change: Change | None = None) -> Path:
        """Write the checkpoint; `change` may alter its tensors first."""
        tensors = self.tensors()
        if change:
            change(tensors)
        return write_checkpoint(root, tensors, self.model_config(), shards=2)

    def _apart(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        names = dict(zip(PROJECTIONS, ("w1", "w3", "w2"), strict=True))
        for expert in range(self.experts):
            for projection in self.projections:
                word = names[projection] if self.kind == "deepseek" else f"{projection}_proj"
                name = f"{self.prefix(layer)}.{expert}.{word}"
                yield from self._parts(name, self.matrix(layer, expert, projection))

    def _parts(self, name: str, matrix: Matrix) -> Iterator[tuple[str, Tensor]]:
        packed = "weight_packed" if self.kind.startswith("ct") else "weight"
        scale = "scale" if self.kind == "deepseek" else "weight_scale"
        dtype = self.scale_dtype or {"deepseek": "F8_E8M0"}.get(
            self.kind, "F8_E4M3" if self.is_nvfp4 else "U8"
        )
        shape = matrix.codes.shape if self.weight_dtype == "F4" else matrix.packed.shape
        yield f"{name}.{packed}", (self.weight_dtype, shape, matrix.packed.tobytes())
        yield f"{name}.{scale}", (dtype, matrix.scales.shape, matrix.scales.tobytes())
        if self.is_nvfp4:
            with np.errstate(divide="ignore"):
                value = 1 / matrix.scale if self.kind == "ct" else matrix.scale
            word = "weight_global_scale" if self.kind == "ct" else "weight_scale_2"
            shape = (1,) if self.kind == "ct" else ()
            yield f"{name}.{word}", ("F32", shape, np.float32(value).tobytes())
            if self.input_scales:
                word = "input_global_scale" if self.kind == "ct" else "input_scale"
                yield f"{name}.{word}", ("F32", shape, np.float32(0.5).tobytes())

    def _stacks(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        E = self.experts
        gates, ups, downs = (
            [self.matrix(layer, expert, name) for expert in range(E)] for name in PROJECTIONS
        )
        gate_up = [
            (pairs(gate.packed, up.packed), pairs(gate.scales, up.scales))
            for gate, up in zip(gates, ups, strict=True)
        ]
        down = [(matrix.packed, matrix.scales) for matrix in downs]
        gate_bias, up_bias, down_bias = (self.bias(layer, name) for name in PROJECTIONS)
        both_bias = np.stack((gate_bias, up_bias), axis=-1).reshape(E, 2 * self.intermediate)
        for name, matrices, bias in (
            ("gate_up_proj", gate_up, both_bias),
            ("down_proj", down, down_bias),
        ):
            blocks, scales = (np.stack(parts) for parts in zip(*matrices, strict=True))
            stem = f"{self.prefix(layer)}.{name}"
            shape = (*blocks.shape[:2], blocks.shape[2] // 16, 16)
            yield f"{stem}_blocks", ("U8", shape, blocks.tobytes())
            yield f"{stem}_scales", ("U8", scales.shape, scales.tobytes())
            yield f"{stem}_bias", ("BF16", bias.shape, bias.tobytes())

    def _bf16(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        for expert in range(self.experts):
            for projection in self.projections:
                shape = self.shape(projection)
                data = np.random.default_rng([layer, expert]).bytes(2 * shape[0] * shape[1])
                name = f"{self.prefix(layer)}.{expert}.{projection}_proj.weight"
                yield name, ("BF16", shape, data)


def seed(*words: object) -> int:
    """Return a number that stands for these words."""
    return xxhash.xxh3_64_intdigest(repr(words).encode())


def pairs(gate: Array, up: Array) -> Array:
    """Return the rows of both in turn: gate 0, up 0, gate 1, …"""
    return np.stack((gate, up), axis=1).reshape(2 * len(gate), *gate.shape[1:])
