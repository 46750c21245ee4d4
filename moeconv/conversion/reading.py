"""How does the source matrix of one expert come together?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import xxhash

from moeconv.checkpoint.origin import Span
from moeconv.checkpoint.reader import Reader, scratch_bytes
from moeconv.output.manifest import SourceDigest
from moeconv.planning.jobs import Passthrough, Place

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Part
    from moeconv.layouts.layout import Matrix
    from moeconv.planning.jobs import Tensor
    from moeconv.tensors import Bytes


def read_matrix(
    reader: Reader, places: Sequence[Place], out: Bytes, scratch: Bytes
) -> tuple[SourceDigest, ...]:
    """Assemble the source matrix of one expert in `out`, zeros where it is padded.

    Returns the digests of what was read, a source tensor each.
    """
    return read_matrices(reader, [places], out[None], scratch)


def read_matrices(
    reader: Reader, experts: Sequence[Sequence[Place]], outs: Bytes, scratch: Bytes
) -> tuple[SourceDigest, ...]:
    """Do the same for several experts, in the rows of `outs`."""
    return tuple(
        SourceDigest(part.ref.name, *part.span, xxhash.xxh3_128_hexdigest(raw))
        for part, raw in reader.read_parts(windows(experts, outs), scratch)
    )


def windows(experts: Sequence[Sequence[Place]], outs: Bytes) -> list[tuple[Part, Bytes]]:
    """Return where each part goes in the rows of `outs`; what no part fills there is zeros."""
    found = []
    for places, out in zip(experts, outs, strict=True):
        filled = 0
        for place in places:
            rows, cols = place.part.shape
            row_bytes = cols * place.part.item_bytes
            found.append((place.part, out[place.row : place.row + rows, :row_bytes]))
            filled += rows * row_bytes
        if filled < out.nbytes:
            out.fill(0)
    return found


def spans_of(tensors: Iterable[Tensor], piece_bytes: int) -> Iterator[Span]:
    """Yield what is read for these tensors, in this order; what passes through, in pieces."""
    for tensor in tensors:
        if isinstance(tensor, Passthrough):
            ref, size = tensor.ref, tensor.spec.nbytes
            for begin in range(0, size, piece_bytes):
                yield Span(ref.file, ref.begin + begin, min(piece_bytes, size - begin))
        else:
            for expert in tensor.experts:
                yield from (span_of(place.part) for place in tensor.places(expert))


def span_of(part: Part) -> Span:
    """Return what reading a part reads."""
    begin, end = part.span
    return Span(part.ref.file, part.ref.begin + begin, end - begin)


def scratch_for(places: Sequence[Place], matrix: Matrix) -> int:
    """Return the bytes that reading a source matrix needs beside it."""
    return max((scratch_bytes(place.part, matrix.row_bytes) for place in places), default=0)
