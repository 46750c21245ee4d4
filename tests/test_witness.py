"""A fault that a layout shares with its inverse undoes itself; those who do not share it see it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeconv.errors import VerifyError
from moeconv.kernels import marlin, rowmaps
from moeconv.kernels.cpu import CpuKernels
from moeconv.kernels.witness import lay_out_apart
from moeconv.layouts.verbs import GlobalScale, MarlinRows, MarlinWeight, RowBlocks
from moeconv.verification.verify import Verified, verify
from tests import runs
from tests.fp4.models import Model

SMALL: dict[str, Any] = {"layers": 1, "experts": 5, "hidden": 128, "intermediate": 128}
VERBS = (
    RowBlocks(128, 256, gated=True, unit_rows=32),
    RowBlocks(128, 256, gated=True, unit_rows=128),
    RowBlocks(96, 128, gated=False, unit_rows=96),
    MarlinWeight(64, 2, 3, stored=True),
    MarlinRows(64, 2, 4, 1, "wide", stored=True),
    MarlinRows(64, 1, 1, 2, "bias", stored=False),
)


@pytest.fixture
def exchange_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Exchange two rows of every shuffle, in the layout and so in its inverse."""
    right = rowmaps.shuffle_rows

    def wrong(rows: int) -> rowmaps.Index:
        index = right(rows)
        index[[0, 1]] = index[[1, 0]]
        return index

    maps = (rowmaps.block_index, rowmaps.inverse_block_index)
    for cached in maps:
        cached.cache_clear()
    monkeypatch.setattr(rowmaps, "shuffle_rows", wrong)
    yield
    for cached in maps:
        cached.cache_clear()


def verified(out: Path, source: Path) -> Verified:
    *_, result = verify(out, CpuKernels(), source=source)
    assert isinstance(result, Verified)
    return result


def matrix(verb: RowBlocks | MarlinWeight | MarlinRows) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if isinstance(verb, RowBlocks):
        shape = verb.rows, verb.row_bytes
    elif isinstance(verb, MarlinWeight):
        shape = verb.rows * verb.halves, 8 * verb.tiles
    else:
        shape = verb.rows * verb.halves, verb.groups * verb.item_bytes
    return np.random.default_rng(7).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_others_lay_out_the_same_bytes(verb: RowBlocks | MarlinWeight | MarlinRows) -> None:
    if isinstance(verb, RowBlocks):
        pytest.importorskip("flashinfer", reason="flashinfer has wheels for Linux only")
    source = matrix(verb)
    ours, theirs = np.zeros((2, source.size), np.uint8)
    CpuKernels().lay_out(verb, source, ours)
    expected = "FlashInfer" if isinstance(verb, RowBlocks) else "plain torch"
    assert lay_out_apart(verb, source, theirs) == expected
    assert np.array_equal(ours, theirs)


def test_nobody_lays_out_a_number() -> None:
    verb = GlobalScale(0, 1.0, "F32", reciprocal=False)
    assert lay_out_apart(verb, np.zeros((1, 4), np.uint8), np.zeros(4, np.uint8)) is None


def test_a_sample_of_each_parameter_is_laid_out_by_flashinfer(
    source: Path, converted: Path
) -> None:
    pytest.importorskip("flashinfer", reason="flashinfer has wheels for Linux only")
    result = verified(converted, source)
    params = len(runs.plan(source)[0].stacks) * 2
    assert set(result.witnessed) == {"FlashInfer"}
    assert 2 * params <= result.witnessed["FlashInfer"] <= 3 * params
    assert not result.unwitnessed


def test_without_flashinfer_it_says_that_nobody_checked(
    source: Path, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    result = verified(converted, source)
    assert not result.witnessed
    assert result.unwitnessed
    shown = " ".join(runs.invoke("verify", converted, "--source", source).split())
    assert re.search(rf"{result.unwitnessed} not checked by others", shown)


@pytest.mark.usefixtures("exchange_rows")
def test_a_fault_of_the_row_map_and_its_inverse_is_seen(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("flashinfer", reason="flashinfer has wheels for Linux only")
    out = runs.run(source, tmp_path / "out")
    with pytest.raises(VerifyError, match="is not what FlashInfer makes of its source: expert 0"):
        verified(out, source)


@pytest.mark.parametrize("fault", ["unit_order", "_each_half"])
def test_a_fault_of_marlin_and_its_inverse_is_seen(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    Model("modelopt", **SMALL).write(source)
    monkeypatch.setattr(marlin, fault, FAULTS[fault])
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
    with pytest.raises(VerifyError, match="is not what plain torch makes of its source") as found:
        verified(out, source)
    assert "same fault" in (found.value.hint or "")


def _swapped_order(order: str) -> Any:
    right = _UNIT_ORDER(order)
    right[[0, 1]] = right[[1, 0]]
    return right


def _plain_copy(_verb: MarlinWeight, source: Any, packed: Any, *, inverse: bool) -> None:
    one, other = source.reshape(-1), packed.reshape(-1)
    one[...] = other if inverse else one
    other[...] = other if inverse else one


_UNIT_ORDER = marlin.unit_order
FAULTS: dict[str, Callable[..., Any]] = {"unit_order": _swapped_order, "_each_half": _plain_copy}


def test_what_marlin_leaves_is_counted_by_who_saw_it(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    Model("modelopt", **SMALL).write(source)
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
    result = verified(out, source)
    assert set(result.witnessed) == {"plain torch"}
    assert 4 * 2 <= result.witnessed["plain torch"] <= 4 * 3
    assert result.unwitnessed >= 2 * 2  # w13's and w2's global scales
