"""Which byte ranges are asked for together? Decided before the first is read.

What is read and when is known: the spans of a job, in the order in which it reads them. Spans that
lie together in the source are fetched as one extent; those of it that are read later wait in
memory. Room for waiting is bounded, and goes first to where it costs least: few bytes, soon read.
So the scales between the weights of an expert come along with them, and where a layer fits, all of
an expert does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

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

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.end - self.begin


def plan_extents(spans: Sequence[Span], waiting_bytes: int, most_bytes: int) -> tuple[Extent, ...]:
    """Return extents that hold every span once, in the order in which they are first read.

    Parameters
    ----------
    spans
        In the order in which they are read.
    waiting_bytes
        How much may lie in memory, at any time, between the first read of an extent and the read
        that it is there for.
    most_bytes
        Largest extent, unless one span is larger.
    """
    order = sorted(range(len(spans)), key=lambda i: (spans[i].file, spans[i].begin, i))
    groups = [
        Extent(it.file, it.begin, it.begin + it.nbytes, (i,)) for i in order for it in (spans[i],)
    ]
    whose = list(range(len(order)))  # of each span in file order: its group, through those it took
    before = tuple(accumulate((span.nbytes for span in spans), initial=0))
    waiting = np.zeros(len(spans), np.int64)
    edges = [(0, left, right) for left, right in pairwise(range(len(order)))]
    while edges:
        known, left, right = heappop(edges)
        a, b = _find(whose, left), _find(whose, right)
        both = _together(groups[a], groups[b])
        if both is None or both.nbytes > most_bytes:
            continue
        early, late = sorted((groups[a], groups[b]), key=lambda group: group.spans[0])
        first, second, more = early.spans[0], late.spans[0], both.nbytes - early.nbytes
        cost = more * (before[second] - before[first])
        if cost > known:  # groups have grown since it was last looked at
            heappush(edges, (cost, left, right))
        elif waiting[first:second].max(initial=0) + more <= waiting_bytes:
            waiting[first:second] += more
            groups[a], whose[b] = both, a
    found = (groups[at] for at in range(len(order)) if whose[at] == at)
    return tuple(sorted(found, key=lambda extent: extent.spans[0]))


def _find(whose: list[int], at: int) -> int:
    while whose[at] != at:
        whose[at] = at = whose[whose[at]]
    return at


def _together(left: Extent, right: Extent) -> Extent | None:
    """Return the extent of two that are neighbours in a file; none if they are not near."""
    if left.file != right.file or right.begin - left.end > GAP_BYTES:
        return None
    end = max(left.end, right.end)
    return Extent(left.file, left.begin, end, tuple(sorted((*left.spans, *right.spans))))
