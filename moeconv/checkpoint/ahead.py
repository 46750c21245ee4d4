"""Bytes of the Hub's files before they are asked for, in bounded memory."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from moeconv.checkpoint.extents import Extent, plan_extents
from moeconv.checkpoint.origin import Span
from moeconv.tensors import round_up

if TYPE_CHECKING:
    from moeconv.ranges.rows import Numbers, Tables
    from moeconv.tensors import Bytes

_STREAMS: Final = 8
"""Connections at once: an answer takes some 50 ms to begin, whatever it brings."""

_EXTENT_BYTES: Final = 1 << 24

Fill = Callable[[str, int, memoryview], None]


class HubRanges:
    """Byte ranges by requests, made ahead where it is known what comes.

    Parameters
    ----------
    fill
        Fills memory with a file's bytes from an offset on.
    ahead_bytes
        Memory for what was fetched and is not read yet; 0 to fetch nothing ahead.
    """

    def __init__(self, fill: Fill, ahead_bytes: int) -> None:
        self.bytes_read = 0
        self._fill, self._ahead_bytes = fill, ahead_bytes
        self._lock = threading.Lock()
        self._windows: list[_Window] = []
        self._pool = ThreadPoolExecutor(_STREAMS, thread_name_prefix="moeconv-hub")

    def close(self) -> None:
        """Wait for requests that are on their way."""
        self._pool.shutdown(cancel_futures=True)

    def read_range(self, file: str, begin: int, out: Bytes) -> int:
        """Fill `out` (contiguous bytes) from an offset on; return how many there were."""
        view = memoryview(out).cast("B")
        span = Span(file, begin, len(view))
        with self._lock:
            self.bytes_read += len(view)
            windows = tuple(self._windows)
        if len(view) and not any(window.take(span, view) for window in windows):
            self._fill(file, begin, view)
        return len(view)

    def read_rows(self, file: str, begins: Numbers, tables: Tables) -> int:
        """Leave it to `read_range`: what was fetched ahead is only copied."""
        del file, begins, tables
        return 0

    @contextmanager
    def ahead(self, spans: Iterable[Span]) -> Iterator[None]:
        """Fetch what the block will read, in the order in which it will."""
        if not self._ahead_bytes:
            yield
            return
        window = _Window(self._fill, self._pool, list(spans), self._ahead_bytes)
        with self._lock:
            self._windows.append(window)
        try:
            yield
        finally:
            with self._lock:
                self._windows.remove(window)
            window.close()


class _Window:
    """The extents of one job: fetched in the order of their use, as far as memory goes."""

    def __init__(
        self, fill: Fill, pool: ThreadPoolExecutor, spans: Sequence[Span], most_bytes: int
    ) -> None:
        self._fill, self._pool, self._most = fill, pool, most_bytes
        wanted = [span for span in spans if 0 < span.nbytes <= most_bytes // _STREAMS]
        extent_bytes = min(_EXTENT_BYTES, most_bytes // _STREAMS)
        # What waits and what is on its way share the memory.
        self._extents = plan_extents(wanted, most_bytes // 2, extent_bytes)
        self._where = {wanted[i]: n for n, it in enumerate(self._extents) for i in it.spans}
        self._left: list[set[Span]] = [set() for _ in self._extents]
        for span, number in self._where.items():
            self._left[number].add(span)
        self._held: dict[int, _Fetched] = {}
        self._next, self._bytes = 0, 0
        self._lock = threading.Lock()
        with self._lock:
            self._pump()

    def take(self, span: Span, out: memoryview) -> bool:
        """Fill memory with a span that was planned; false if it was not."""
        with self._lock:
            number = self._where.pop(span, None)
            if number is None:
                return False
            if number not in self._held:
                self._start(number)  # out of turn; the reader waits for it, so memory must be there
            held = self._held[number]
        held.copy(span.begin - self._extents[number].begin, out)
        with self._lock:
            self._left[number].remove(span)
            if not self._left[number]:
                self._held.pop(number, None)
                self._bytes -= held.nbytes
            elif self._is_apart(number, span):
                self._bytes -= held.release(span.begin - self._extents[number].begin, span.nbytes)
            self._pump()
        return True

    def close(self) -> None:
        """Fetch nothing more."""
        with self._lock:
            self._next = len(self._extents)
            for held in self._held.values():
                held.cancel()
            self._held.clear()

    def _is_apart(self, number: int, span: Span) -> bool:
        """Say whether nothing that is still to be taken overlaps a span."""
        return all(
            it.begin >= span.begin + span.nbytes or it.begin + it.nbytes <= span.begin
            for it in self._left[number]
        )

    def _pump(self) -> None:
        """Start as many extents as memory holds; one is always under way."""
        while self._next < len(self._extents):
            size = self._extents[self._next].nbytes
            if self._held and self._bytes + size > self._most:
                return
            if self._next not in self._held and self._left[self._next]:
                self._start(self._next)
            self._next += 1

    def _start(self, number: int) -> None:
        extent = self._extents[number]
        self._bytes += extent.nbytes
        self._held[number] = _Fetched(extent, self._fill, self._pool)


class _Fetched:
    """An extent on its way, then in memory, of which pages go back when they were used."""

    def __init__(self, extent: Extent, fill: Fill, pool: ThreadPoolExecutor) -> None:
        # A map goes back to the system when it is dropped, and a private one page by page; the
        # heap would keep it.
        self._map = mmap.mmap(-1, extent.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._done = pool.submit(fill, extent.file, extent.begin, memoryview(self._map))
        self.nbytes = extent.nbytes

    def copy(self, begin: int, out: memoryview) -> None:
        """Fill memory from an offset on; wait for the bytes if need be."""
        self._done.result()
        out[:] = memoryview(self._map)[begin : begin + len(out)]

    def release(self, begin: int, size: int) -> int:
        """Give the pages back that lie in a range whole; return their bytes."""
        first = round_up(begin, mmap.PAGESIZE)
        nbytes = (begin + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if nbytes <= 0:
            return 0
        self._map.madvise(mmap.MADV_DONTNEED, first, nbytes)
        self.nbytes -= nbytes
        return nbytes

    def cancel(self) -> None:
        """Do not fetch it, if that has not begun."""
        self._done.cancel()
