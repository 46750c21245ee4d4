"""The converted weights stand for what the source's stand for, read by an independent path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import runs
from tests.fp4.held import held, source_values
from tests.fp4.models import KINDS, Model

SIZES = ((256, 256), (320, 96), (192, 160))
"""H and I: whole units; H padded or not, and I padded; one group in the last unit."""


def convert(model: Model, root: Path, *options: str) -> Path:
    source, out = model.write(root / "source"), root / "out"
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu", *options)
    return out


@pytest.mark.parametrize("tp", [None, 1])
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_converted_is_what_the_source_stands_for(
    kind: str, hidden: int, intermediate: int, tp: int | None, tmp_path: Path
) -> None:
    if kind == "ct-mxfp4":  # this engine path pads nothing
        intermediate = -(-intermediate // 64) * 64
    model = Model(kind, hidden=hidden, intermediate=intermediate, layers=1, experts=2)
    out = convert(model, tmp_path, *(("--tp", "1") if tp else ()))
    read = held(model, out)
    for expert in range(model.experts):
        found = read.values(0, expert)
        for name in model.projections:
            expected = source_values(model, model.matrix(0, expert, name))
            if kind == "ct":  # 1 / (1 / x) is what the engine computes
                np.testing.assert_allclose(found[name], expected, rtol=1e-6)
            else:
                np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize("kind", ["modelopt", "nemotron"])
def test_fp16_stands_for_the_same(kind: str, tmp_path: Path) -> None:
    model = Model(kind, layers=1, experts=2)
    read = held(model, convert(model, tmp_path, "--serving-dtype", "float16"), fp16=True)
    for name, found in read.values(0, 1).items():
        np.testing.assert_array_equal(found, source_values(model, model.matrix(0, 1, name)))


def test_a_factor_cancels(tmp_path: Path) -> None:
    def small(layer: int, expert: int, name: str, scales: np.ndarray) -> None:
        scales[...] = 8 + scales % 24 if expert else 8 + scales % 8

    model = Model("modelopt", layers=1, experts=2, change_scales=small)
    read = held(model, convert(model, tmp_path))
    for expert in range(2):
        for name, found in read.values(0, expert).items():
            expected = source_values(model, model.matrix(0, expert, name))
            np.testing.assert_array_equal(found, expected)
    assert read.scales(0, "w13")[0] < np.float32(2.0**119 / 256), "some factor was taken out"
