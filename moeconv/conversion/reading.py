"""How does the source matrix of one expert come together?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    filled = sum(
        place.part.shape[0] * place.part.shape[1] * place.part.item_bytes for place in places
    )
    if filled < out.nbytes:
        out.fill(0)
    sources = []
    for place in places:
        part = place.part
        rows, cols = part.shape
        window = out[place.row : place.row + rows, : cols * part.item_bytes]
        raw = reader.read_part(part, window, scratch)
        digest = xxhash.xxh3_128_hexdigest(raw)
        sources.append(SourceDigest(part.ref.name, *part.span, digest))
    return tuple(sources)


def spans_of(tensors: Iterable[Tensor], piece_bytes: int) -> list[Span]:
    """Return what is read for these tensors, in this order; what passes through, in pieces."""
    spans: list[Span] = []
    for tensor in tensors:
        if isinstance(tensor, Passthrough):
            ref, size = tensor.ref, tensor.spec.nbytes
            spans += [
                Span(ref.file, ref.begin + begin, min(piece_bytes, size - begin))
                for begin in range(0, size, piece_bytes)
            ]
        else:
            places = (place for expert in tensor.experts for place in tensor.places(expert))
            spans += [span_of(place.part) for place in places]
    return spans


def span_of(part: Part) -> Span:
    """Return what reading a part reads."""
    begin, end = part.span
    return Span(part.ref.file, part.ref.begin + begin, end - begin)


def scratch_for(places: Sequence[Place], matrix: Matrix) -> int:
    """Return the bytes that reading a source matrix needs beside it."""
    return max((scratch_bytes(place.part, matrix.row_bytes) for place in places), default=0)
