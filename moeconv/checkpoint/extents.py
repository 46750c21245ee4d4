"""Which byte ranges are asked for together? Decided before the first is read.

What is read and when is known: the spans of a job, in the order in which it reads them. Spans that
lie together in the source are fetched as one extent, as long as all of them are read soon: within
a window of bytes, so that what waits in memory is never more than the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from moeconv.checkpoint.origin import Span

GAP_BYTES: Final = 1 << 18
"""Bytes that nobody wants may come along; asking once more would cost about as much."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes `[begin, end)` of a file, fetched at once, and which of the spans they hold."""

    file: str
    begin: int
    end: int
    spans: tuple[int, ...]


def plan_extents(spans: Sequence[Span], window_bytes: int, most_bytes: int) -> tuple[Extent, ...]:
    """Return extents that hold every span once, in the order in which they are first read.

    Parameters
    ----------
    spans
        In the order in which they are read.
    window_bytes
        How far ahead of its reading a span may be fetched, in bytes that are read in between.
    most_bytes
        Largest extent, unless one span is larger.
    """
    before = list(accumulate((span.nbytes for span in spans), initial=0))
    order = sorted(range(len(spans)), key=lambda i: (spans[i].file, spans[i].begin, i))
    left, right = _neighbours(order)
    extents: list[Extent] = []
    fetched: set[int] = set()
    for i, span in enumerate(spans):
        if i in fetched:
            continue
        begin, end, held = span.begin, span.begin + span.nbytes, [i]
        for side in (right, left):
            at = side.get(i)
            while at is not None and at not in fetched:
                other = spans[at]
                wider = min(begin, other.begin), max(end, other.begin + other.nbytes)
                gap = max(other.begin - end, begin - other.begin - other.nbytes)
                is_near = other.file == span.file and gap <= GAP_BYTES
                is_soon = i < at and before[at + 1] - before[i] <= window_bytes
                if not (is_near and is_soon and wider[1] - wider[0] <= most_bytes):
                    break
                begin, end = wider
                held.append(at)
                at = side.get(at)
        fetched.update(held)
        extents.append(Extent(span.file, begin, end, tuple(held)))
    return tuple(extents)


def _neighbours(order: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return who lies before each span in its file, and who behind."""
    pairs = tuple(pairwise(order))
    return {b: a for a, b in pairs}, dict(pairs)
