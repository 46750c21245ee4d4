"""May this be an output directory at all? Asked before anything is written, and by a dry run."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moeconv.errors import OutputError
from moeconv.output.durable import writing
from moeconv.output.names import WORK_FOLDER
from moeconv.paths import is_text

_GIVE: Final = "give another `--out`"


def check_place(root: Path) -> None:
    """Refuse a directory that cannot be made or written to, or whose links lead out of it.

    Raises
    ------
    OutputError
        It is so.
    """
    with writing(root):
        above = existing(root)
        if not above.is_dir():
            message = f"`{above}` is not a directory"
            raise OutputError(message, hint=_GIVE)
        if not os.access(above, os.W_OK | os.X_OK):
            message = f"`{above}` cannot be written to"
            raise OutputError(message, hint=_GIVE)
        longest = max(len(os.fsencode(part)) for part in root.parts or ("",))
        if longest > os.pathconf(above, "PC_NAME_MAX"):
            message = f"`{root}` has a name that is too long for its disk"
            raise OutputError(message, hint=_GIVE)
        if above == root.resolve():
            _check_links(root)


def check_apart(root: Path, source: Path) -> None:
    """Refuse to write into a checkpoint, by whatever path its folders are reached.

    Raises
    ------
    OutputError
        The output directory is the checkpoint, or lies inside.
    """
    with writing(root):
        inside = {_identity(folder) for folder in _folders(source)}
        above = existing(root)
        if any(_identity(folder) in inside for folder in (above, *above.parents)):
            message = f"`{root}` lies inside the checkpoint `{source}`, where nothing is written"
            raise OutputError(message, hint="give an `--out` beside it")


@contextlib.contextmanager
def errors_below(root: Path) -> Iterator[None]:
    """Name the file where the system refuses to look at one of a directory.

    Raises
    ------
    OutputError
        It does; an error of another place stays as it is.
    """
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str) or not Path(error.filename).is_relative_to(root):
            raise
        with writing(Path(error.filename)):
            raise


def existing(root: Path) -> Path:
    """Return a directory, or the nearest one above that is there; links resolved.

    Raises
    ------
    OutputError
        Nothing can be there: its path leads nowhere.
    """
    check_path(root)
    path = root.resolve()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_path(root: Path) -> None:
    """Refuse a path that leads nowhere, or that no note and no message can name.

    Raises
    ------
    OutputError
        It is no text, goes by a link to nothing or up from a folder that is not there, or cannot be
        looked at.
    """
    if not is_text(str(root)):
        message = f"`{ascii(str(root))[1:-1]}` is not UTF-8, and no message could name it"
        raise OutputError(message, hint=_GIVE)
    with writing(root):
        if not root.is_absolute() and not _has_working_directory():
            message = f"`{root}` is nowhere: the working directory was removed"
            raise OutputError(message, hint="`cd` to a directory that is there")
        for above in reversed((root, *root.parents)):
            if above.is_symlink() and not above.exists():
                message = f"`{above}` is a link that leads to nothing"
                raise OutputError(
                    message, hint="remove it, or make the directory it should lead to"
                )
        for above, below in itertools.pairwise(reversed((root, *root.parents))):
            if below.name == ".." and not above.is_dir():
                message = f"`{root}` goes up from `{above}`, which is not a directory"
                raise OutputError(message, hint="give the path without the detour")


def _has_working_directory() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def free_bytes(root: Path) -> int:
    """Return what may be written to the disk of a directory, there or not."""
    return shutil.disk_usage(existing(root)).free


def _check_links(root: Path) -> None:
    for folder, folders, files in os.walk(root):
        is_work = Path(folder).is_relative_to(root / WORK_FOLDER)
        for name in (*folders, *(files if is_work else ())):
            path = Path(folder) / name
            if path.is_symlink():
                message = f"`{path}` is a link, so what is written there would lie elsewhere"
                raise OutputError(message, hint="remove it; `--out` itself may be a link")


def _folders(root: Path) -> Iterator[Path]:
    for folder, _, _ in os.walk(root.resolve()):
        yield Path(folder)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
