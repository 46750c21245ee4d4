"""Bytes of the Hub's files before they are asked for, in bounded memory."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from moeconv.checkpoint.extents import Extent, plan_extents
from moeconv.checkpoint.origin import Span

if TYPE_CHECKING:
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

    @contextmanager
    def ahead(self, spans: Sequence[Span]) -> Iterator[None]:
        """Fetch what the block will read, in the order in which it will."""
        if not self._ahead_bytes:
            yield
            return
        window = _Window(self._fill, self._pool, spans, self._ahead_bytes)
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
        self._extents = plan_extents(wanted, most_bytes // 2, extent_bytes)
        self._where = {wanted[i]: n for n, it in enumerate(self._extents) for i in it.spans}
        self._left = [
            len({wanted[i] for i in extent.spans if self._where[wanted[i]] == n})
            for n, extent in enumerate(self._extents)
        ]
        self._held: dict[int, Future[memoryview]] = {}
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
            future = self._held[number]
        extent = self._extents[number]
        at = span.begin - extent.begin
        out[:] = future.result()[at : at + span.nbytes]
        with self._lock:
            self._left[number] -= 1
            if not self._left[number]:
                self._held.pop(number, None)
                self._bytes -= extent.end - extent.begin
                self._pump()
        return True

    def close(self) -> None:
        """Fetch nothing more."""
        with self._lock:
            self._next = len(self._extents)
            for future in self._held.values():
                future.cancel()
            self._held.clear()

    def _pump(self) -> None:
        """Start as many extents as memory holds; one is always under way."""
        while self._next < len(self._extents):
            extent = self._extents[self._next]
            size = extent.end - extent.begin
            if self._held and self._bytes + size > self._most:
                return
            if self._next not in self._held and self._left[self._next]:
                self._start(self._next)
            self._next += 1

    def _start(self, number: int) -> None:
        extent = self._extents[number]
        self._bytes += extent.end - extent.begin
        self._held[number] = self._pool.submit(self._fetch, extent)

    def _fetch(self, extent: Extent) -> memoryview:
        # A map goes back to the system when it is dropped; the heap would keep it.
        view = memoryview(mmap.mmap(-1, extent.end - extent.begin))
        self._fill(extent.file, extent.begin, view)
        return view
