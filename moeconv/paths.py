"""Which files may be opened? By name, none outside a directory; by kind, plain files only."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath


def is_below(name: str) -> bool:
    """Say whether a relative name, whoever wrote it, names a file below the directory it is for.

    On Windows too, where a copy of the directory may go.
    """
    path = PurePosixPath(name)
    is_plain = name.isprintable() and not {*"\0\\"} & {*name} and str(path) == name
    is_inside = not path.is_absolute() and ".." not in path.parts and name != "."
    return is_plain and is_inside and not PureWindowsPath(name).drive


def is_text(name: str) -> bool:
    """Say whether a name is UTF-8, so that notes and messages can hold it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_there(path: Path) -> bool:
    """Say whether a name is taken, by a broken link too; what cannot be looked at is not there."""
    try:
        path.lstat()
    except OSError:
        return False
    return True


def open_regular(path: Path) -> int:
    """Open a regular file for reading; links to one are followed.

    Raises
    ------
    OSError
        It cannot be opened, or is a folder, a pipe, which would wait for ever, or a device.
    """
    # What a device does when it is opened, nobody knows: so look first. What may take its place
    # between the two looks is opened without waiting, and refused by the second.
    _check(path.stat(), path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_regular(path: Path, most: int) -> bytes:
    """Return the content of a regular file that fits memory.

    Raises
    ------
    OSError
        It is no such file, cannot be read, or is larger than `most` bytes.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
    return data


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file.

    Raises
    ------
    OSError
        It is no such file, or cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
