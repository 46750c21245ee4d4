"""The error of both ways of treating global scales that differ; the docs have these figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

from tests import runs
from tests.fp4 import decode
from tests.fp4.held import held, source_values
from tests.fp4.models import Matrix, Model, seed

if TYPE_CHECKING:
    from tests.fp4.models import Array

PAGE: Final = Path(__file__).parents[2] / "docs" / "explanation" / "nvfp4-scales.md"
PAIRS: Final = ((3.85, 4.83), (4.83, 3.85), (3.85, 3.86), (3.85, 4.28), (3.85, 5.5), (3.85, 7.7))
"""Global scales of gate and up, in 1e-5."""


class Gaussian(Model):
    """Random weights, quantised as ModelOpt does: the block's largest value becomes 6."""

    def matrix(self, layer: int, expert: int, projection: str) -> Matrix:
        scale = float(np.float32(self.scales[layer, expert, projection]))
        rng = np.random.default_rng(seed(layer, expert, projection))
        weights = rng.normal(size=self.shape(projection))
        weights *= scale * 6 * 448 / np.abs(weights).max()  # what this global scale is made from
        blocks = weights.reshape(len(weights), -1, 16)
        wanted = np.abs(blocks).max(axis=-1) / 6 / scale
        values = decode.e4m3(np.arange(0x7F, dtype=np.uint8))
        scales = np.abs(wanted[..., None] - values).argmin(axis=-1).astype(np.uint8)
        scaled = blocks / (values[scales] * scale)[..., None]
        codes = np.abs(np.abs(scaled)[..., None] - decode.E2M1[:8]).argmin(axis=-1)
        codes |= (scaled < 0) << 3
        packed = codes.reshape(weights.shape).astype(np.uint8)
        return Matrix(packed, scales, np.float32(scale))


def error(found: Array, expected: Array) -> float:
    """Return the relative RMS error."""
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))


def measured(gate: float, up: float, root: Path) -> list[float]:
    """Return the errors of up and gate the engine's way, then reconciled."""
    scales = {(0, 0, "gate"): gate * 1e-5, (0, 0, "up"): up * 1e-5, (0, 0, "down"): 1e-5}
    model = Gaussian("modelopt", layers=1, experts=1, hidden=512, intermediate=256, scales=scales)
    source = model.write(root / "source")
    errors: list[float] = []
    for options in ((), ("--reconcile-scales",)):
        out = root / f"out{len(errors)}"
        runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu", *options)
        values = held(model, out).values(0, 0)
        errors += [
            error(values[name], source_values(model, model.matrix(0, 0, name)))
            for name in ("up", "gate")
        ]
    return errors


@pytest.mark.parametrize(("gate", "up"), PAIRS)
def test_the_figures_of_the_page(gate: float, up: float, tmp_path: Path) -> None:
    errors = measured(gate, up, tmp_path)
    assert errors[0] == pytest.approx(abs(gate / up - 1), rel=1e-5), "all of up is scaled"
    assert errors[1] == 0
    assert min(errors[2:]) == 0, "the half with the larger scale is as it was"
    assert max(errors[2:]) < 0.03
    row = f"| {gate} | {up} | " + " | ".join(f"{100 * value:.2f} %" for value in errors) + " |"
    print(row)
    assert row in re.sub(r" +", " ", PAGE.read_text())
