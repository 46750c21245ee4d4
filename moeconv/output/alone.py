"""Is anyone else at it? A lock on a directory itself, which leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from moeconv.errors import OutputError


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold a directory for publishing while the block runs; it need not be writable.

    Raises
    ------
    OutputError
        Another process holds it.
    """
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another process is publishing `{root}`"
            raise OutputError(message, hint="wait for it, or end it") from None
        except OSError:
            pass  # a file system without locks; two at once would send twice, and end the same
        yield
    finally:
        os.close(fd)
