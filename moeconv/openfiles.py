"""Byte ranges of files that stay open, by `preadv` into memory that the caller owns."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from moeconv.paths import open_regular

if TYPE_CHECKING:
    from moeconv.tensors import Bytes

_ADVICE: Final = 4 << 20
"""The kernel takes no more bytes than a disk's readahead at once, and forgets the rest."""


class OpenFiles:
    """Files of a directory, opened when they are first read; safe to use from several threads.

    Parameters
    ----------
    root
        The directory that names are relative to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bytes_read = 0
        self._fds: dict[str, int] = {}
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
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def read_range(self, file: str, begin: int, out: Bytes) -> int:
        """Fill `out` (contiguous bytes) from an offset on; return how many there were.

        Raises
        ------
        OSError
            The file cannot be opened or read.
        """
        view, done = memoryview(out).cast("B"), 0
        fd = self._fd(file)
        while done < len(view):
            got = os.preadv(fd, [view[done:]], begin + done)
            if got == 0:
                break
            done += got
        with self._lock:
            self.bytes_read += done
        return done

    def expect(self, file: str, begin: int, nbytes: int) -> None:
        """Let the kernel fetch a range that will be read soon; only the read tells of trouble."""
        with contextlib.suppress(OSError, AttributeError):  # not every system has the call
            fd = self._fd(file)
            for at in range(begin, begin + nbytes, _ADVICE):
                size = min(_ADVICE, begin + nbytes - at)
                os.posix_fadvise(fd, at, size, os.POSIX_FADV_WILLNEED)

    def _fd(self, file: str) -> int:
        with self._lock:
            if file not in self._fds:
                self._fds[file] = open_regular(self.root / file)
            return self._fds[file]
