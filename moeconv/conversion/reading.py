"""How do the source matrices of experts come together?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING

from moeconv.checkpoint.origin import Span
from moeconv.checkpoint.reader import Reader, Rows, scratch_bytes
from moeconv.output.manifest import SourceDigest
from moeconv.planning.jobs import Passthrough
from moeconv.ranges.digests import xxh3_each
from moeconv.ranges.rows import row_by_row

if TYPE_CHECKING:
    from moeconv.checkpoint.types import TensorRef
    from moeconv.layouts.layout import Matrix
    from moeconv.planning.jobs import Lot, Place, Tensor
    from moeconv.ranges.rows import Tables
    from moeconv.tensors import Bytes


def read_matrices(
    reader: Reader, lots: Sequence[Lot], outs: Bytes, scratch: Bytes
) -> tuple[SourceDigest, ...]:
    """Do what `fill_matrices` does, and return the digests of what was read."""
    filled = fill_matrices(reader, lots, outs, scratch)
    digests = chain.from_iterable(map(xxh3_each, filled))
    return tuple(
        SourceDigest(ref.name, begin, begin + nbytes, digest)
        for (ref, begin, nbytes), digest in zip(_reads(lots), digests, strict=True)
    )


def fill_matrices(
    reader: Reader, lots: Sequence[Lot], outs: Bytes, scratch: Bytes
) -> Iterator[Tables]:
    """Assemble source matrices of consecutive experts, zeros where they are padded.

    Yields what was read as rows, an expert after the other, each valid until the next.

    Parameters
    ----------
    reader
        Where bytes come from.
    lots
        What each matrix is made of.
    outs
        `[experts, rows, bytes a row]`, contiguous.
    scratch
        As many bytes as `scratch_for` says.
    """
    windows = [_window(lot.first, outs) for lot in lots]
    if sum(window.nbytes for window in windows) < outs.nbytes:
        outs.fill(0)
    if not lots:
        return
    if all(map(_is_as_stored, lots, windows)):
        flat = [window.reshape(len(window), -1) for window in windows]
        reader.read_rows(
            [Rows(lot.refs, lot.begins, out) for lot, out in zip(lots, flat, strict=True)]
        )
        yield flat
        return
    pairs = zip(lots, windows, strict=True)
    for part, out in row_by_row(zip(lot.parts, window, strict=True) for lot, window in pairs):
        yield [reader.read_part(part, out, scratch)[None]]


def _window(place: Place, outs: Bytes) -> Bytes:
    """Return where the parts of a place go, a part an expert."""
    rows, cols = place.part.shape
    return outs[:, place.row : place.row + rows, : cols * place.part.item_bytes]


def _is_as_stored(lot: Lot, window: Bytes) -> bool:
    """Say whether a part is one run of bytes where it is and where it goes."""
    return lot.first.part.is_whole_rows and window[0].flags.c_contiguous


def _reads(lots: Sequence[Lot]) -> Iterator[tuple[TensorRef, int, int]]:
    """Yield which bytes of which tensor are read, in order: tensor, first byte, and how many."""
    return row_by_row(zip(lot.refs, lot.begins, repeat(lot.nbytes), strict=False) for lot in lots)


def spans_of(tensors: Iterable[Tensor], piece_bytes: int) -> Iterator[Span]:
    """Yield what is read for these tensors, in this order; what passes through, in pieces."""
    for tensor in tensors:
        if isinstance(tensor, Passthrough):
            ref, size = tensor.ref, tensor.spec.nbytes
            for begin in range(0, size, piece_bytes):
                yield Span(ref.file, ref.begin + begin, min(piece_bytes, size - begin))
        else:
            yield from spans_of_lots(tensor.lots(tensor.experts))


def spans_of_lots(lots: Sequence[Lot]) -> Iterator[Span]:
    """Yield what is read for experts, in this order."""
    for ref, begin, nbytes in _reads(lots):
        yield Span(ref.file, ref.begin + begin, nbytes)


def scratch_for(places: Sequence[Place], matrix: Matrix) -> int:
    """Return the bytes that reading a source matrix needs beside it."""
    return max((scratch_bytes(place.part, matrix.row_bytes) for place in places), default=0)
