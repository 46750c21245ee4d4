"""Which source item goes where: the row maps of FlashInfer's TRTLLM layouts, as arithmetic.

FlashInfer is the check (its `shuffle_matrix_a` and `reorder_rows_for_gated_act_gemm`, in the
tests); the arithmetic is what this project exists for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from moeconv.layouts.verbs import K_BLOCK_BYTES, SHUFFLE_ROWS

if TYPE_CHECKING:
    from typing import TypeAlias

    from moeconv.layouts.verbs import RowBlocks

    Index: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def shuffle_rows(rows: int) -> Index:
    """Return, for each of `rows` output rows, its source row under the 32-row shuffle.

    Source row `4a + b` of a block goes to row `a + 8b` (`a < 8`, `b < 4`): FlashInfer 0.7.4,
    `get_shuffle_matrix_a_row_indices`, `epilogue_tile_m = 128`.
    """
    block = np.arange(SHUFFLE_ROWS).reshape(8, 4).T.reshape(-1)
    return (np.arange(rows).reshape(-1, SHUFFLE_ROWS)[:, :1] + block).reshape(-1)


def interleave_rows(rows: int) -> Index:
    """Return the source rows of `(up 0, gate 0, up 1, gate 1, …)` where the source is [gate; up].

    FlashInfer 0.7.4, `get_reorder_rows_for_gated_act_gemm_row_indices`, takes `[up; gate]`; the
    swap of the halves (vLLM 0.33.0 rotates the index by half the rows) is folded in here.
    """
    half = rows // 2
    return np.stack((np.arange(half, rows), np.arange(half)), axis=1).reshape(-1)


def source_rows(verb: RowBlocks) -> Index:
    """Return, for each output row, its source row."""
    rows = shuffle_rows(verb.rows)
    return interleave_rows(verb.rows)[rows] if verb.gated else rows


@lru_cache(maxsize=32)
def block_index(verb: RowBlocks) -> Index:
    """Return, for each output block of 128 bytes, the source block it holds."""
    rows = source_rows(verb)
    blocks = verb.row_bytes // K_BLOCK_BYTES
    index = rows.reshape(-1, 1, verb.unit_rows) * blocks + np.arange(blocks)[:, None]
    return np.ascontiguousarray(index.reshape(-1))


@lru_cache(maxsize=32)
def inverse_block_index(verb: RowBlocks) -> Index:
    """Return, for each source block of 128 bytes, the output block that holds it."""
    index = block_index(verb)
    inverse = np.empty_like(index)
    inverse[index] = np.arange(index.size)
    return inverse
