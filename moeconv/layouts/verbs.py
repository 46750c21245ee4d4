"""What a layout may ask of a kernel.

A verb is a value: a small frozen description of how the bytes of one source matrix become the
bytes of one stored tensor. Layouts choose verbs by arithmetic alone; kernels carry them out, and
undo them, on their device. Both sides meet here and know nothing else of each other.

Every verb takes a *source matrix*: contiguous rows of bytes, already assembled (gate above up)
and zero-padded. A verb is a bijection of bytes unless its docstring says what is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from moeconv.tensors import Bytes

K_BLOCK_BYTES = 128
"""Bytes of a K block (vLLM 0.33.0, `convert_moe_weights_to_flashinfer_trtllm_block_layout`)."""

SHUFFLE_ROWS = 32
"""Rows that the epilogue-tile shuffle permutes among themselves.

FlashInfer 0.7.4, `get_shuffle_matrix_a_row_indices` with `epilogue_tile_m = 128`.
"""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Shuffle rows and cut them into K blocks of 128 bytes.

    Source `[rows, row_bytes]`; result `[rows / unit_rows, row_bytes / 128, unit_rows, 128]`.
    With `unit_rows == rows` that is the engine's `block_major_k`, `[row_bytes / 128, rows, 128]`;
    with `unit_rows == 32` it is the stored order, in which a tensor-parallel rank is one range.

    Attributes
    ----------
    rows
        Rows of the source matrix, a multiple of 32.
    row_bytes
        Bytes a row, a multiple of 128.
    gated
        The source is `[gate; up]`; rows go out as `(up 0, gate 0, up 1, gate 1, …)`, shuffled.
    unit_rows
        Rows that stay together in the result, a multiple of 32 that divides `rows`.
    """

    rows: int
    row_bytes: int
    gated: bool
    unit_rows: int


Verb: TypeAlias = RowBlocks


class Kernels(Protocol):
    """Carries verbs out on one device; safe to use from several threads."""

    @property
    def device(self) -> str:
        """What it runs on, as `cpu` or `cuda:0`."""
        ...

    def empty(self, nbytes: int) -> Bytes:
        """Return an uninitialised host buffer that suits this device's copies."""
        ...

    def lay_out(self, verb: Verb, source: Bytes, out: Bytes) -> None:
        """Fill `out` (flat, contiguous host bytes) with `source` (a host matrix) laid out."""
        ...

    def invert(self, verb: Verb, stored: Bytes, source: Bytes) -> None:
        """Fill `source` with the matrix that `lay_out` made `stored` from."""
        ...
