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
    return tuple(
        SourceDigest(part.ref.name, *part.span, xxhash.xxh3_128_hexdigest(raw))
        for part, raw in read_parts(reader, places, out, scratch)
    )


def read_parts(
    reader: Reader, places: Sequence[Place], out: Bytes, scratch: Bytes
) -> Iterator[tuple[Part, Bytes]]:
    """Do the same; yield each part and the bytes that were read, valid until the next."""
    windows = [(place, *place.part.shape, place.part.item_bytes) for place in places]
    if sum(rows * cols * item_bytes for _, rows, cols, item_bytes in windows) < out.nbytes:
        out.fill(0)
    for place, rows, cols, item_bytes in windows:
        window = out[place.row : place.row + rows, : cols * item_bytes]
        yield place.part, reader.read_part(place.part, window, scratch)


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
