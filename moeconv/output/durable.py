"""When is a file durable, under its own name? After fsync, rename, and fsync of the folder.

A file gets its full size at once, so that a full disk shows before the work.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from moeconv.errors import OutputError

if TYPE_CHECKING:
    from moeconv.tensors import Bytes

DIRECT_ALIGNMENT: Final = 4096
_ADVICE: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make space"),
    **dict.fromkeys((errno.EIO, errno.ENXIO, errno.ENODEV), "look after the disk"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTCONN, errno.ESTALE), "see that the disk is mounted"),
    errno.EROFS: "make the disk writable",
}
"""What to do about what the system says."""


class GrowingFile:
    """One file on its way to being durable.

    Parameters
    ----------
    temporary
        Where it grows; on the same file system as `final`. What is there is removed.
    final
        Where it appears when it is whole.
    size
        How long it will be; it is so from the start.
    begins_with
        What is written at once.

    Raises
    ------
    OutputError
        The disk is full or the file cannot be written.
    """

    def __init__(self, temporary: Path, final: Path, size: int, begins_with: bytes = b"") -> None:
        self._temporary, self._final = temporary, final
        self._is_final = False
        with writing(final):
            temporary.parent.mkdir(exist_ok=True)  # what it lies in is there, or was unmounted
            final.parent.mkdir(parents=True, exist_ok=True)
            self._fd = _create(temporary)
            self._direct_fd = _open_direct(temporary)
            try:
                _allocate(self._fd, size)
                self._pwrite(memoryview(begins_with), 0, self._fd)
            except BaseException:
                self._discard()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_final:
            self._discard()

    def write(self, at: int, data: Bytes) -> None:
        """Write bytes at an absolute offset; any order, any thread."""
        view = memoryview(data).cast("B")
        with writing(self._final):
            if (
                self._direct_fd >= 0
                and not (at | data.nbytes | data.ctypes.data) % DIRECT_ALIGNMENT
            ):
                try:
                    self._pwrite(view, at, self._direct_fd)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._direct_fd = -1
                else:
                    return
            self._pwrite(view, at, self._fd)

    def keep(self) -> None:
        """Make the file durable under its final name."""
        with writing(self._final):
            os.fsync(self._fd)
            self._temporary.replace(self._final)
            self._is_final = True
            self._close()
            sync_folder(self._final.parent)

    @staticmethod
    def _pwrite(view: memoryview, at: int, fd: int) -> None:
        while view:
            done = os.pwrite(fd, view, at)
            view, at = view[done:], at + done

    def _close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1

    def _discard(self) -> None:
        self._close()
        _drop(self._temporary)


class writing:  # noqa: N801  (reads as a verb where it is used)
    """Turn what the system says about a file into an `OutputError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, OSError):
            return
        advice = _ADVICE.get(error.errno or 0)
        again = "and run the same command again; finished shards are kept"
        hint = f"{advice}, {again}" if advice else None
        message = f"`{self._path}` cannot be written: {error.strerror}"
        raise OutputError(message, hint=hint) from error


def write_file(path: Path, chunks: Iterable[bytes], staging: Path) -> None:
    """Write a file whole or not at all, durably, with the umask's mode.

    It grows in the folder `staging`, on the same file system.
    """
    temporary = staging / f"{os.getpid()}.{threading.get_ident()}.part"
    with writing(path):
        staging.mkdir(exist_ok=True)  # what it lies in is there, or was unmounted
        fd = _create(temporary)
        try:
            try:
                for chunk in chunks:
                    _write(fd, memoryview(chunk))
                os.fsync(fd)
            finally:
                os.close(fd)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(path)
        except BaseException:
            _drop(temporary)
            raise
        sync_folder(path.parent)


def _write(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def _drop(temporary: Path) -> None:
    """Remove what will not be whole, if the trouble with it allows; the next run does."""
    with contextlib.suppress(OSError):
        temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _create(path: Path) -> int:
    """Open a file of our own: whatever had this name, a link above all, is not written to."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)


def _open_direct(path: Path) -> int:
    """Open past the page cache, where the file system can: as fast, at a tenth of the CPU time."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return -1


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        os.ftruncate(fd, size)  # a file system without it: a full disk shows later
