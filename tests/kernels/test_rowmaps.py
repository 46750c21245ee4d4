"""The row maps against FlashInfer's public functions, and one order worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from moeconv.kernels.rowmaps import block_index, interleave_rows, inverse_block_index, shuffle_rows
from moeconv.layouts.verbs import RowBlocks

ROWS = (32, 64, 96, 128, 192, 256, 768, 1408, 3072)


@pytest.fixture(scope="module")
def flashinfer():
    return pytest.importorskip("flashinfer", reason="flashinfer has wheels for Linux only")


@pytest.mark.parametrize("rows", ROWS)
def test_shuffle_is_that_of_flashinfer(rows, flashinfer):
    import torch

    index = torch.arange(rows, dtype=torch.int32).reshape(rows, 1)
    expected = flashinfer.shuffle_matrix_a(index, 128)
    assert shuffle_rows(rows).tolist() == expected.reshape(-1).tolist()


@pytest.mark.parametrize("rows", ROWS)
def test_interleave_is_that_of_flashinfer(rows, flashinfer):
    import torch

    gate_up = torch.arange(rows).reshape(rows, 1)
    up_gate = gate_up.roll(rows // 2, 0)  # FlashInfer takes [up; gate], checkpoints have [gate; up]
    expected = flashinfer.reorder_rows_for_gated_act_gemm(up_gate)
    assert interleave_rows(rows).tolist() == expected.reshape(-1).tolist()


def test_first_block_by_hand(kernels):
    """Gate rows are +1.0 and up rows -1.0 in BF16, the row number in the low bits."""
    gate = 0x3F80 | np.arange(64, dtype=np.uint16)
    up = 0xBF80 | np.arange(64, dtype=np.uint16)
    source = np.repeat(np.concatenate([gate, up])[:, None], 64, axis=1)
    out = np.empty(source.nbytes, np.uint8)

    kernels.lay_out(RowBlocks(128, 128, gated=True, unit_rows=32), source.view(np.uint8), out)

    expected = [
        *(0xBF80 | row for row in (0, 2, 4, 6, 8, 10, 12, 14)),
        *(0x3F80 | row for row in (0, 2, 4, 6, 8, 10, 12, 14)),
        *(0xBF80 | row for row in (1, 3, 5, 7, 9, 11, 13, 15)),
        *(0x3F80 | row for row in (1, 3, 5, 7, 9, 11, 13, 15)),
    ]
    assert out.view(np.uint16).reshape(-1, 64)[:32, 0].tolist() == expected


def test_first_block_of_plain_rows_by_hand(kernels):
    """A non-gated matrix keeps all its rows, without a swap or an interleave."""
    source = np.repeat(np.arange(64, dtype=np.uint16)[:, None], 64, axis=1)
    out = np.empty(source.nbytes, np.uint8)

    kernels.lay_out(RowBlocks(64, 128, gated=False, unit_rows=32), source.view(np.uint8), out)

    rows = out.view(np.uint16).reshape(-1, 64)[:, 0]
    assert rows[:12].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13]
    assert sorted(rows[:32].tolist()) == list(range(32))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("unit_rows", [32, 96])
def test_inverse_undoes_the_map(gated, unit_rows):
    verb = RowBlocks(96, 384, gated=gated, unit_rows=unit_rows)
    index = block_index(verb)
    assert sorted(index.tolist()) == list(range(96 * 3))
    assert index[inverse_block_index(verb)].tolist() == list(range(96 * 3))
