"""What a converted directory holds of an expert, read by the definition in `decode`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tests import runs
from tests.fp4 import decode

if TYPE_CHECKING:
    from tests.fp4.models import Matrix, Model

    Array: TypeAlias = np.ndarray


@dataclass(frozen=True)
class Held:
    """All parameters of TP 1, in the engine's order."""

    model: Model
    read: dict[tuple[int, str], bytes]
    fp16: bool = False

    def expert(self, layer: int, param: str, expert: int) -> bytes:
        """Return one expert's bytes of a parameter."""
        data = self.read[layer, param]
        size = len(data) // self.model.experts
        return data[expert * size : (expert + 1) * size]

    def scales(self, layer: int, param: str) -> Array:
        """Return global scales."""
        return np.frombuffer(self.read[layer, f"{param}_weight_scale_2"], np.float32)

    def values(self, layer: int, expert: int) -> dict[str, Array]:
        """Return the dequantised projections of an expert, padding taken off (and checked)."""
        H, I = self.model.hidden, self.model.intermediate
        w13, w2 = (self._matrix(layer, expert, param) for param in ("w13", "w2"))
        if self.model.kind == "gptoss":
            halves = [w13[0::2], w13[1::2]]
        else:
            halves = np.split(w13, 2 if self.model.gated else 1)
        found = dict(zip(self.model.projections, (*halves, w2), strict=True))
        for name, value in found.items():
            rows, cols = (H, I) if name == "down" else (I, H)
            assert not value[rows:].any()
            assert not value[:, cols:].any()
            found[name] = value[:rows, :cols]
        return found

    def _matrix(self, layer: int, expert: int, param: str) -> Array:
        words = self.expert(layer, f"{param}_weight", expert)
        scales = self.expert(layer, f"{param}_weight_scale", expert)
        group = 16 if self.model.is_nvfp4 else 32
        unit = 1 if self.model.kind == "ct-mxfp4" or self.model.is_nvfp4 else 256
        hidden = -(-self.model.hidden // unit) * unit
        values = 2 * len(words)
        inputs = hidden if param == "w13" else values // hidden
        assert len(scales) * group == values
        if self.model.is_nvfp4:
            scale = float(self.scales(layer, param)[expert])
            outputs = values // inputs
            return decode.nvfp4(words, scales, scale, inputs, outputs, fp16=self.fp16)
        return decode.mxfp4(words, scales, inputs, values // inputs)


def held(model: Model, out: Path, *, fp16: bool = False) -> Held:
    """Read a converted directory as its only rank does."""
    return Held(model, runs.rank_bytes(out), fp16)


def source_values(model: Model, matrix: Matrix) -> Array:
    """Return what a source matrix stands for."""
    values = decode.e4m3 if model.is_nvfp4 else decode.e8m0
    scale = float(matrix.scale) if model.is_nvfp4 else 1.0
    return decode.dequantised(matrix.codes, values(matrix.scales), scale)
