"""Read byte ranges of a finished directory's files."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from moeconv.errors import VerifyError

if TYPE_CHECKING:
    from moeconv.tensors import Bytes


class Files:
    """Open files of a directory, by relative path; safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
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

    def read(self, file: str, begin: int, out: Bytes) -> None:
        """Fill `out` (contiguous bytes) from an absolute offset of a file.

        Raises
        ------
        VerifyError
            The file is missing, cannot be read or ended early.
        """
        view, done = memoryview(out).cast("B"), 0
        try:
            fd = self._fd(file)
            while done < len(view):
                got = os.preadv(fd, [view[done:]], begin + done)
                if got == 0:
                    break
                done += got
        except OSError as error:
            message = f"`{self.root / file}` cannot be read: {error.strerror}"
            raise VerifyError(message) from error
        if done < len(view):
            message = f"`{file}` ended early: expected {len(view)} bytes at {begin}, found {done}"
            raise VerifyError(message, hint="copy this file again; `moeconv verify` names all")

    def _fd(self, file: str) -> int:
        with self._lock:
            if file not in self._fds:
                self._fds[file] = os.open(self.root / file, os.O_RDONLY | os.O_CLOEXEC)
            return self._fds[file]
