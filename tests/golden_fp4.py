"""FP4 checkpoints of the golden file: the names and files that each scheme publishes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.sources import write_checkpoint

if TYPE_CHECKING:
    from tests.sources import Tensor

_FILE = Path(__file__).with_name("golden.json")
_NONGATED = {"model_type": "nemotron_h", "layers_block_type": ["moe"]}


@dataclass(frozen=True)
class Fp4Case:
    """A FP4 model of the golden file."""

    row: dict[str, Any]

    @property
    def name(self) -> str:
        """Name in the file."""
        return str(self.row["case"])

    @property
    def target(self) -> str:
        """Which engine function made the digests."""
        return str(self.row["target"])

    @property
    def is_nvfp4(self) -> bool:
        """Whether groups are 16 and there are global scales."""
        return "nvfp4" in self.target

    def options(self) -> list[str]:
        """Command-line options that ask for these bytes."""
        return [
            "--nvfp4" if self.is_nvfp4 else "--mxfp4",
            *("--engine", self.row.get("engine", "vllm")),
            *("--serving-dtype", self.row.get("dtype", "bfloat16")),
            *("--max-lost-scales", "100"),
        ]

    def write(self, root: Path, *, reciprocal: bool = False) -> Path:
        """Write the checkpoint, with compressed-tensors' names and scales if `reciprocal`."""
        tensors = dict(self._tensors(reciprocal=reciprocal))
        return write_checkpoint(root, tensors, self._config(), shards=2)

    def _data(self, tensor: str, expert: int, *shape: int) -> np.ndarray:
        text = f"moeconv/{self.name}/{tensor}/{expert}".encode()
        data = hashlib.shake_256(text).digest(int(np.prod(shape)))
        return np.frombuffer(data, np.uint8).reshape(shape)

    def _scales(self, tensor: str, expert: int, *shape: int) -> np.ndarray:
        raw = self._data(tensor, expert, *shape)
        if not self.is_nvfp4:
            return 100 + raw % 28
        modulus = self.row.get("scale_byte_modulus_by_expert")
        modulus = modulus[expert] if modulus else self.row["scale_byte_modulus"]
        scales: np.ndarray = raw % modulus
        upper = self.row.get("scale_byte_modulus_upper_half")
        if upper:
            rows, cols = raw.shape
            half = np.s_[:, cols // 2 :] if tensor.startswith("down") else np.s_[rows // 2 :]
            scales[half] = raw[half] % upper
        return scales

    def _tensors(self, *, reciprocal: bool) -> Iterator[tuple[str, Tensor]]:
        hidden = self.row["hidden"]
        yield "model.norm.weight", ("BF16", (hidden,), bytes(2 * hidden))
        if self.row.get("interleaved"):
            yield from self._stacks()
            return
        for expert in range(self.row["experts"]):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                if projection != "gate_proj" or self.row["gated"]:
                    yield from self._projection(expert, projection, reciprocal=reciprocal)

    def _projection(
        self, expert: int, projection: str, *, reciprocal: bool
    ) -> Iterator[tuple[str, Tensor]]:
        H, I = self.row["hidden"], self.row["intermediate"]
        rows, cols = (H, I) if projection == "down_proj" else (I, H)
        group = 16 if self.is_nvfp4 else 32
        weight = self._data(f"{projection}.weight", expert, rows, cols // 2)
        scale = self._scales(f"{projection}.weight_scale", expert, rows, cols // group)
        base = "backbone.layers.0.mixer" if not self.row["gated"] else "model.layers.0.mlp"
        name = f"{base}.experts.{expert}.{projection}"
        packed = reciprocal or self.target == "marlin-mxfp4-ct"
        dtype = "F8_E4M3" if self.is_nvfp4 else "U8"
        yield (
            f"{name}.{'weight_packed' if packed else 'weight'}",
            ("U8", weight.shape, weight.tobytes()),
        )
        yield f"{name}.weight_scale", (dtype, scale.shape, scale.tobytes())
        if self.is_nvfp4:
            which = "down" if projection == "down_proj" else "gate_up"
            first = self._data(f"{which}.weight_scale_2", expert, 1)[0]
            value = np.float32((int(first) % 64 + 1) / 4096)
            if reciprocal:
                value = np.float32(1) / value
            global_name = "weight_global_scale" if reciprocal else "weight_scale_2"
            yield f"{name}.{global_name}", ("F32", (1,), value.tobytes())
            yield (
                f"{name}.{'input_global_scale' if reciprocal else 'input_scale'}",
                ("F32", (1,), np.float32(0.5).tobytes()),
            )

    def _stacks(self) -> Iterator[tuple[str, Tensor]]:
        E, H, I = self.row["experts"], self.row["hidden"], self.row["intermediate"]
        for name, rows, cols in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
            parts = {
                "blocks": ("U8", (rows, cols // 32, 16), self._data, (rows, cols // 2)),
                "scales": ("U8", (rows, cols // 32), self._scales, (rows, cols // 32)),
                "bias": ("BF16", (rows,), self._data, (rows, 2)),
            }
            for part, (dtype, shape, fill, drawn) in parts.items():
                tensor = f"{name}_{part}"
                data = b"".join(fill(tensor, expert, *drawn).tobytes() for expert in range(E))
                yield f"model.layers.0.mlp.experts.{tensor}", (dtype, (E, *shape), data)

    def _config(self) -> dict[str, Any]:
        E, H, I = self.row["experts"], self.row["hidden"], self.row["intermediate"]
        config = {
            "hidden_size": H,
            "num_hidden_layers": 1,
            "torch_dtype": self.row.get("dtype", "bfloat16"),
        }
        if self.row.get("interleaved"):
            return {
                **config,
                "model_type": "gpt_oss",
                "num_local_experts": E,
                "intermediate_size": I,
            }
        config["moe_intermediate_size"] = I
        if not self.row["gated"]:
            return {**config, **_NONGATED, "n_routed_experts": E}
        return {**config, "model_type": "qwen3_moe", "num_experts": E}


@dataclass(frozen=True)
class Fp4Rank:
    """What one rank holds."""

    case: Fp4Case
    row: dict[str, Any]

    @property
    def tp(self) -> tuple[int, int]:
        """TP size and rank."""
        return self.row["tp"], self.row["rank"]

    @property
    def ep(self) -> tuple[int, int]:
        """EP size and rank."""
        return self.row.get("ep", 1), self.row.get("ep_rank", 0)

    def __str__(self) -> str:
        return f"{self.case.name}-tp{self.tp[0]}.{self.tp[1]}-ep{self.ep[0]}.{self.ep[1]}"


FP4_RANKS = tuple(
    Fp4Rank(Fp4Case(row), rank)
    for row in json.loads(_FILE.read_bytes())["cases"]
    # A bias on halves is in no published checkpoint; the layout suite has it, no scheme does.
    if row["target"].startswith("marlin") and not row.get("bias")
    for rank in row["ranks"]
)
"""Every rank of every FP4 target."""
