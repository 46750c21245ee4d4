"""Tiny source checkpoints, written by hand: also those that a library would refuse to write."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from moeconv.tensors import TensorSpec

Tensor: TypeAlias = tuple[str, tuple[int, ...], bytes]
"""Dtype code, shape, bytes."""

Fill: TypeAlias = Callable[[str, int], bytes]
"""Name and size to bytes."""


def noise(name: str, size: int, seed: int = 0) -> bytes:
    """Bytes of every pattern (so BF16 NaNs with payloads too), by name and seed."""
    return np.random.default_rng(xxhash.xxh3_64_intdigest(name.encode(), seed)).bytes(size)


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], *, pad: int = 0, cut: int = 0
) -> None:
    """Write a shard in the order given; `pad` spaces end the header, `cut` bytes are missing."""
    table: dict[str, object] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    body = b"".join(data for _, _, data in tensors.values())
    write_raw(path, json.dumps(table).encode() + b" " * pad, body[: len(body) - cut])


def write_raw(path: Path, header: bytes, body: bytes = b"") -> None:
    """Write header length, header and data as they are, sound or not."""
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)


@dataclass(frozen=True)
class Tiny:
    """What a tiny checkpoint holds.

    `storage` is one of `per-expert`, `stacked`, `transposed`, `plain` (non-gated); `extra` are
    tensors beside those of the model, `config` overrides keys (`None` removes one).
    """

    experts: int = 4
    hidden: int = 128
    intermediate: int = 128
    layers: int = 2
    shards: int = 2
    storage: str = "per-expert"
    dtype: str = "BF16"
    seed: int = 0
    index: bool = True
    fill: Fill | None = None
    extra: Mapping[str, Tensor] | None = None
    config: Mapping[str, Any] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, by name."""
        return {**dict(self._tensors()), **(self.extra or {})}

    def model_config(self) -> dict[str, Any]:
        """Return `config.json`."""
        kind = {"transposed": "llama4_text", "plain": "nemotron_h"}.get(self.storage, "qwen3_moe")
        config: dict[str, Any] = {
            "model_type": kind,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            {"llama4_text": "num_local_experts", "nemotron_h": "n_routed_experts"}.get(
                kind, "num_experts"
            ): self.experts,
            "intermediate_size"
            if kind == "llama4_text"
            else "moe_intermediate_size": self.intermediate,
        }
        if kind == "nemotron_h":
            config["layers_block_type"] = ["moe"] * self.layers
        config.update(self.config or {})
        return {key: value for key, value in config.items() if value is not None}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        E, H, I = self.experts, self.hidden, self.intermediate
        yield "model.embed_tokens.weight", self._bf16("model.embed_tokens.weight", 16, H)
        for layer in range(self.layers):
            router = f"model.layers.{layer}.mlp.gate.weight"
            yield router, self._bf16(router, E, H)
            prefix = self.prefix(layer)
            shapes: dict[str, tuple[int, ...]]
            match self.storage:
                case "stacked":
                    shapes = {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I)}
                case "transposed":
                    shapes = {"gate_up_proj": (E, H, 2 * I), "down_proj": (E, I, H)}
                case "plain":
                    shapes = {
                        f"{e}.{name}.weight": shape
                        for e in range(E)
                        for name, shape in (("up_proj", (I, H)), ("down_proj", (H, I)))
                    }
                case _:
                    shapes = {
                        f"{e}.{name}.weight": shape
                        for e in range(E)
                        for name, shape in (
                            ("gate_proj", (I, H)),
                            ("up_proj", (I, H)),
                            ("down_proj", (H, I)),
                        )
                    }
            for name, shape in shapes.items():
                yield f"{prefix}.{name}", self._tensor(f"{prefix}.{name}", self.dtype, *shape)
        yield "model.norm.weight", self._bf16("model.norm.weight", H)
        yield "odd.bias", self._tensor("odd.bias", "U8", 3)

    def prefix(self, layer: int) -> str:
        """Module that holds the experts of a layer."""
        template = {
            "transposed": "model.layers.{}.feed_forward.experts",
            "plain": "backbone.layers.{}.mixer.experts",
        }.get(self.storage, "model.layers.{}.mlp.experts")
        return template.format(layer)

    def _bf16(self, name: str, *shape: int) -> Tensor:
        return self._tensor(name, "BF16", *shape)

    def _tensor(self, name: str, dtype: str, *shape: int) -> Tensor:
        size = TensorSpec(dtype, shape).nbytes
        data = self.fill(name, size) if self.fill else noise(name, size, self.seed)
        return dtype, shape, data


def write_tiny(root: Path, tiny: Tiny) -> Path:
    """Write the checkpoint, its tensors dealt out so that projections land in different shards."""
    return write_checkpoint(
        root, tiny.tensors(), tiny.model_config(), shards=tiny.shards, index=tiny.index
    )


def write_checkpoint(
    root: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    shards: int = 1,
    index: bool = True,
) -> Path:
    """Write tensors, config, index and a side file."""
    root.mkdir(parents=True)
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(root / file, {name: tensors[name] for name in names[i::shards]})
        weight_map.update(dict.fromkeys(names[i::shards], file))
    (root / "config.json").write_text(json.dumps(config))
    (root / "tokenizer.json").write_text('{"version": "1.0"}')
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (root / "model.safetensors.index.json").write_text(text)
    return root
