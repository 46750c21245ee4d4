"""What a layout may ask of a kernel.

A verb is a value: a small frozen description of how the bytes of one source matrix become the
bytes of one stored tensor. Layouts choose verbs by arithmetic alone; kernels carry them out, and
undo them, on their device. Both sides meet here and know nothing else of each other.

Every verb takes a *source matrix*: contiguous rows of bytes, already assembled (gate above up)
and zero-padded. A verb is a bijection of bytes unless its docstring says what is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from moeconv.tensors import Bytes

K_BLOCK_BYTES = 128
"""Bytes of a K block (vLLM 0.33.0, `convert_moe_weights_to_flashinfer_trtllm_block_layout`)."""

SHUFFLE_ROWS = 32
"""Rows that the epilogue-tile shuffle permutes among themselves.

FlashInfer 0.7.4, `get_shuffle_matrix_a_row_indices` with `epilogue_tile_m = 128`.
"""

MARLIN_ROWS = 64
"""Rows of a Marlin unit: a tile's 64 columns of the transposed weight."""

MARLIN_TILE = 16
"""Input values of a Marlin tile; with 4-bit values, 8 bytes of a row."""

MARLIN_RUN_BYTES = 512
"""Bytes that one unit and one tile make: 128 int32 words."""


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


@dataclass(frozen=True, slots=True)
class MarlinWeight:
    """Repack 4-bit weights into Marlin tiles (16-bit activations).

    Source `[halves * rows, 8 * tiles]`, two values a byte, the low nibble first. A run of 512
    bytes holds one unit of 64 rows and one tile of 16 values. Result, in runs:
    `[tiles, halves, rows / 64]` (the engine's int32 `[K/16, 2N]`), or stored
    `[rows / 64, halves, tiles]`.
    """

    rows: int
    halves: int
    tiles: int
    stored: bool


@dataclass(frozen=True, slots=True)
class MarlinRows:
    """Transpose what belongs to rows (block scales, biases) and permute it within 64-row units.

    Source `[halves * rows, groups]` items; result, in units of 64 items,
    `[groups, halves, rows / 64]` (the engine's order), or stored `[rows / 64, halves, groups]`.

    Attributes
    ----------
    item_bytes
        1 for block scales, 2 for biases.
    order
        `wide` and `single` are the two scale permutations, each followed by Marlin's `[0, 2, 1,
        3]` of every four; `bias` is `single` alone.
    recode
        A table of 256 bytes for each half, for 1-byte items: what each byte becomes. Bytes that
        share an image with another are lost.
    power_bytes
        Bytes of a source item that is a floating-point power of two (4 for float32, 2 for
        bfloat16), to be kept as its exponent byte (E8M0); 0 where items are kept as they are. A
        number that is no power of two is rounded to the nearest, and lost.
    """

    rows: int
    halves: int
    groups: int
    item_bytes: int
    order: Literal["wide", "single", "bias"]
    stored: bool
    recode: tuple[bytes, ...] = ()
    power_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GlobalScale:
    """Turn a projection's global scale into the one that Marlin multiplies with.

    Source: one float32 for each fused projection, gate first. Result: one number of `dtype`,
    `scale * 2^exponent / divisor`, every step rounded to `dtype`. Lost: up's own scale where it
    differs, and what rounding takes.

    Attributes
    ----------
    largest
        Take the largest scale of the projections, not gate's.
    reciprocal
        The source stores `1 / scale`; it is inverted in float32 before anything else.
    """

    exponent: int
    divisor: float
    dtype: Literal["F32", "BF16", "F16"]
    reciprocal: bool
    largest: bool = False


Verb: TypeAlias = RowBlocks | MarlinWeight | MarlinRows | GlobalScale


def is_lossless(verb: Verb) -> bool:
    """Return whether every source byte can be got back."""
    match verb:
        case RowBlocks() | MarlinWeight():
            return True
        case MarlinRows():
            is_kept = all(len(set(table)) == len(table) for table in verb.recode)
            return is_kept and not verb.power_bytes
        case GlobalScale():
            return False


class Kernels(Protocol):
    """Carries verbs out on one device; safe to use from several threads."""

    @property
    def device(self) -> str:
        """What it runs on, as `cpu` or `cuda:0`."""
        ...

    @property
    def name(self) -> str:
        """What moves the bytes there: `numpy`, `numba`, `torch`, `triton` or `reference`."""
        ...

    def lay_out(self, verb: Verb, source: Bytes, out: Bytes) -> None:
        """Fill `out` (flat, contiguous host bytes) with `source` (a host matrix) laid out."""
        ...

    def invert(self, verb: Verb, stored: Bytes, source: Bytes) -> None:
        """Fill `source` with the matrix that `lay_out` made `stored` from.

        Where bytes are lost, the lowest that gives the stored byte stands in for them. A
        `GlobalScale` has no inverse; its source is left as it is.
        """
        ...


class Station(Protocol):
    """A place on a device for one batch at a time."""

    def lay_out(self, verb: Verb, sources: Bytes, outs: Bytes) -> None:
        """Fill each row of `outs` with that row of `sources` laid out; both on the host."""
        ...


@runtime_checkable
class DeviceKernels(Kernels, Protocol):
    """Kernels whose device has memory of its own: many experts of one verb in one launch there.

    Work is queued on the device's current stream. A row of each tensor is one expert: u8 `[n, bytes
    of the source matrix]` and `[n, bytes of the result]`, contiguous, without memory in common,
    starting on a multiple of 16 bytes.
    """

    def lay_out_batch(self, verb: Verb, sources: torch.Tensor, outs: torch.Tensor) -> None:
        """Fill each row of `outs` with that row of `sources` laid out."""
        ...

    def invert_batch(self, verb: Verb, stored: torch.Tensor, sources: torch.Tensor) -> None:
        """Fill each row of `sources` with the matrix that `lay_out_batch` made `stored` from."""
        ...

    def batch_bytes(self, source_bytes: int, out_bytes: int) -> int:
        """Return the device memory that a batch of such sizes takes from copy to copy."""
        ...

    def station(self, source_bytes: int, out_bytes: int) -> Station:
        """Return a place for batches of at most such sizes."""
        ...

    def pinned(self, memory: Bytes) -> AbstractContextManager[None]:
        """Let the device copy from and to this host memory directly, while the block runs."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Most device memory that this process took so far, beside the driver's own."""
        ...
