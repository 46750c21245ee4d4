"""Byte ranges of files that stay open for a while, by `preadv` into memory that the caller owns."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from moeconv.paths import open_regular
from moeconv.ranges.rows import are_many, row_addresses, row_sizes

if TYPE_CHECKING:
    from moeconv.ranges.readloop import Fill
    from moeconv.ranges.rows import Numbers, Tables
    from moeconv.tensors import Bytes

_ADVICE: Final = 4 << 20
"""The kernel takes no more bytes than a disk's readahead at once, and forgets the rest."""


_MOST_OPEN: Final = 24
"""Checkpoints have thousands of shards, and a process may have as few as 64 files open."""


@functools.cache
def fill_loop() -> Fill | None:
    """Return what fills many ranges in one call; `None` where numba is not installed."""
    try:
        from moeconv.ranges.readloop import fill
    except ImportError:
        return None
    return fill


@dataclass(slots=True)
class _File:
    """An open file, and how many threads read from it now."""

    fd: int
    readers: int = 0


class OpenFiles:
    """Files of a directory, opened when they are read; safe to use from several threads.

    Those that were not read for longest are closed when many are open.

    Parameters
    ----------
    root
        The directory that names are relative to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bytes_read = 0
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that were opened so far."""
        with self._lock:
            for file in self._files.values():
                os.close(file.fd)
            self._files.clear()

    def read_range(self, file: str, begin: int, out: Bytes) -> int:
        """Fill `out` (contiguous bytes) from an offset on; return how many there were.

        Raises
        ------
        OSError
            The file cannot be opened or read.
        """
        view, done = memoryview(out).cast("B"), 0
        with self._reading(file) as fd:
            while done < len(view):
                got = os.preadv(fd, [view[done:]], begin + done)
                if got == 0:
                    break
                done += got
        with self._lock:
            self.bytes_read += done
        return done

    def read_rows(self, file: str, begins: Numbers, tables: Tables) -> int:
        """Fill rows from an offset each, in one call where they are many.

        Returns how many were filled, from the first on; whoever asks reads the rest by
        `read_range`, which tells of trouble.

        Raises
        ------
        OSError
            The file cannot be opened.
        """
        fill = fill_loop() if are_many(tables) else None
        if fill is None or not all(table.flags.writeable for table in tables):
            return 0
        sizes = row_sizes(tables)
        with self._reading(file) as fd:
            done = fill(fd, begins, row_addresses(tables), sizes)
        with self._lock:
            self.bytes_read += int(sizes[:done].sum())
        return done

    def expect(self, file: str, begin: int, nbytes: int) -> None:
        """Let the kernel fetch a range that will be read soon; only the read tells of trouble."""
        # Not every system has the call.
        with contextlib.suppress(OSError, AttributeError), self._reading(file) as fd:
            for at in range(begin, begin + nbytes, _ADVICE):
                size = min(_ADVICE, begin + nbytes - at)
                os.posix_fadvise(fd, at, size, os.POSIX_FADV_WILLNEED)

    def _close_idle(self, most: int) -> None:
        """Close files that nobody reads from, those first that were not read for longest."""
        idle = [name for name, held in self._files.items() if not held.readers]
        for name in idle[:most]:
            os.close(self._files.pop(name).fd)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        """Hold a file open while the block runs."""
        with self._lock:
            file = self._files.pop(name, None) or _File(open_regular(self.root / name))
            self._files[name] = file  # the last one read comes last
            file.readers += 1
            if len(self._files) > _MOST_OPEN:
                self._close_idle(len(self._files) - _MOST_OPEN)
        try:
            yield file.fd
        finally:
            with self._lock:
                file.readers -= 1
