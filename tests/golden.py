"""The golden digests: what the engines hold after their own load-time processing.

`golden.json` has the rule by which every input byte is made, and the SHA-256 of every parameter of
every rank; it was made with vLLM 0.33.0, SGLang 0.5.23 and FlashInfer 0.7.4.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeconv.layouts.layout import Geometry, Slice
from moeconv.schemes import SCHEMES
from moeconv.tensors import BITS

if TYPE_CHECKING:
    from moeconv.layouts.layout import Output
    from moeconv.tensors import Bytes
    from tests.sources import Tensor

_FILE = Path(__file__).with_name("golden.json")


@dataclass(frozen=True)
class Case:
    """A model of the golden file."""

    name: str
    geometry: Geometry

    def data(self, tensor: str, expert: int, size: int) -> bytes:
        """Bytes of a source tensor, by the golden file's rule."""
        text = f"moeconv/{self.name}/{tensor}/{expert}"
        return hashlib.shake_256(text.encode()).digest(size)

    def matrices(self, expert: int) -> dict[tuple[str, str], Bytes]:
        """Source matrices of one expert, by projection and part."""
        H, I = self.geometry.hidden, self.geometry.intermediate
        shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
        return {
            (name, "weight"): np.frombuffer(
                bytearray(self.data(f"{name}_proj", expert, 2 * I * H)), np.uint8
            ).reshape(rows, 2 * cols)
            for name, (rows, cols) in shapes.items()
            if self.geometry.gated or name != "gate"
        }

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Per-expert source tensors under a prefix."""
        H, I = self.geometry.hidden, self.geometry.intermediate
        return {
            f"{prefix}.{expert}.{name}_proj.weight": (
                "BF16",
                (H, I) if name == "down" else (I, H),
                matrix.tobytes(),
            )
            for expert in range(self.geometry.experts)
            for (name, _), matrix in self.matrices(expert).items()
        }


@dataclass(frozen=True)
class Rank:
    """What one rank holds."""

    case: Case
    tp: int
    rank: int
    ep: int
    ep_rank: int
    shapes: dict[str, tuple[int, ...]]
    sha256: dict[str, str]

    @property
    def experts(self) -> range:
        """Its experts."""
        each = self.case.geometry.experts // self.ep
        return range(each * self.ep_rank, each * (self.ep_rank + 1))

    def __str__(self) -> str:
        return f"{self.case.name}-tp{self.tp}.{self.rank}-ep{self.ep}.{self.ep_rank}"


def _ranks(target: str) -> Iterator[Rank]:
    for row in json.loads(_FILE.read_bytes())["cases"]:
        if row["target"] != target:
            continue
        sizes = Geometry(row["experts"], row["hidden"], row["intermediate"], row["gated"])
        case = Case(row["case"], sizes)
        for rank in row["ranks"]:
            yield _rank(case, rank)


def _rank(case: Case, row: dict[str, Any]) -> Rank:
    return Rank(
        case,
        row["tp"],
        row["rank"],
        row.get("ep", 1),
        row.get("ep_rank", 0),
        {name: tuple(out["shape"]) for name, out in row["out"].items()},
        {name: out["sha256"] for name, out in row["out"].items()},
    )


TRTLLM_BF16_RANKS = tuple(_ranks("trtllm-bf16"))
"""Every rank of the target `trtllm-bf16`."""


def random_matrices(
    scheme_name: str, geometry: Geometry, seed: int
) -> dict[tuple[str, str], Bytes]:
    """Source matrices of one expert in a scheme, of random bytes."""
    scheme = next(scheme for scheme in SCHEMES if scheme.name == scheme_name)
    rng = np.random.default_rng(seed)
    H, I = geometry.hidden, geometry.intermediate
    fused = {"gate_up": (2 * I, H), "down": (H, I)}
    apart = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    table = {}
    for name, (rows, inner) in (fused if geometry.order == "pairs" else apart).items():
        for row in scheme.parts:
            cols = {"matrix": -(-inner // row.values), "rows": 1, "scalar": 1}[row.axes]
            shape = (1 if row.axes == "scalar" else rows, cols * BITS[row.dtypes[0]] // 8)
            table[name, row.part] = rng.integers(0, 256, shape, np.uint8)
    return table


def assemble(
    output: Output, cut: Slice, matrices: dict[tuple[str, str], Bytes], scheme_name: str
) -> Bytes:
    """Put together the source matrix that an output's verb takes, for one slice."""
    scheme = next(scheme for scheme in SCHEMES if scheme.name == scheme_name)
    row = next(row for row in scheme.parts if row.part == output.matrix.part)
    whole = np.zeros(output.matrix.shape, np.uint8)
    if output.matrix.blank:
        return whole
    for i, projection in enumerate(output.matrix.projections):
        part = matrices[projection, row.part]
        if row.axes == "matrix" and projection == "down":
            item = BITS[row.dtypes[0]] // 8
            part = part[:, cut.start // row.values * item : cut.stop // row.values * item]
        elif row.axes != "scalar" and projection != "down":
            share = 2 if projection == "gate_up" else 1
            part = part[share * cut.start : share * cut.stop]
        top = i * output.matrix.rows
        whole[top : top + part.shape[0], : part.shape[1]] = part
    return whole
