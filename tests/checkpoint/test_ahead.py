"""What was fetched ahead is what is read, whoever reads it and in whatever order."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeconv.checkpoint.ahead import HubRanges, _Fetched
from moeconv.checkpoint.extents import Extent
from moeconv.checkpoint.origin import Span

DATA = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)


def fill(_name: str, begin: int, out: memoryview) -> None:
    out[:] = memoryview(DATA)[begin : begin + len(out)]


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    """Spans of some pages, which may overlap, and may be the same."""
    sizes = draw(st.lists(st.integers(1, 1 << 14), min_size=1, max_size=30))
    return [Span("a", draw(st.integers(0, len(DATA) - size)), size) for size in sizes]


@given(spans(), st.data(), st.sampled_from([1 << 14, 1 << 18, 1 << 22]))
def test_bytes_are_those_of_the_file(planned: list[Span], data: st.DataObject, memory: int) -> None:
    ranges = HubRanges(fill, memory)
    try:
        with ranges.ahead(planned):
            for span in data.draw(st.permutations(planned)):
                out = np.empty(span.nbytes, np.uint8)
                assert ranges.read_range(span.file, span.begin, out) == span.nbytes
                assert np.array_equal(out, DATA[span.begin : span.begin + span.nbytes])
    finally:
        ranges.close()


@given(st.integers(0, 1 << 16), st.integers(1, 1 << 16))
def test_pages_that_were_used_go_back(begin: int, size: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        held = _Fetched(Extent("a", 0, 1 << 17, (0,)), fill, pool)
        out = np.empty(1 << 17, np.uint8)
        held.copy(0, memoryview(out))
        freed = held.release(begin, size)
        assert held.nbytes == (1 << 17) - freed
        assert freed > size - 2 * mmap.PAGESIZE
        held.copy(0, memoryview(out))
    gone = np.flatnonzero(out != DATA[: 1 << 17])
    assert set(gone) <= set(range(begin, begin + size))
    assert len(gone) >= 0.9 * freed
