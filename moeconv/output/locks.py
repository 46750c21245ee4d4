"""Who is at work in a directory? Locks that the system frees with the process that holds them."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import filelock

from moeconv.output.durable import writing
from moeconv.output.names import MANIFEST_NAME, WORK_FOLDER

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path


class Locks:
    """The locks of an output directory, whose work folder is there.

    Parameters
    ----------
    root
        The directory.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._folder = root, root / WORK_FOLDER / "locks"
        self._place: tuple[int, int] | None = None

    def names(self) -> list[str]:
        """Return those that anybody has ever taken."""
        return sorted(path.name for path in self._folder.glob("*"))

    def take(self, name: str, *, wait: bool = True) -> AbstractContextManager[object] | None:
        """Take a lock and return it, to be let go at the end of a `with` block.

        `None` where another process holds it and there is no waiting, or where one has sealed the
        directory meanwhile and tidied up.

        Raises
        ------
        OutputError
            It cannot be written.
        """
        # A job may be let go by another thread than the one that took it.
        lock = filelock.FileLock(self._folder / name, thread_local=False)
        with writing(self._folder / name):
            try:
                self._folder.mkdir(exist_ok=True)
                held = lock.acquire(timeout=-1 if wait else 0)
                self._stay()
            except filelock.Timeout:
                return None
            except (FileNotFoundError, FileExistsError):  # it goes between two looks
                lock.release()
                if not (self._root / MANIFEST_NAME).exists():
                    raise
                return None
        return held

    def _stay(self) -> None:
        """Refuse another folder of the name: the library makes it where the disk was unmounted."""
        found = self._folder.stat()
        place = found.st_dev, found.st_ino
        self._place = self._place or place
        if place != self._place:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
