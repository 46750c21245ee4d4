"""What may `--overwrite` remove? Only what moeconv wrote, and only where no run is alive."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from moeconv.errors import OutputError, VerifyError
from moeconv.output.codec import read_manifest, read_note
from moeconv.output.durable import sync_folder, writing
from moeconv.output.locks import Locks
from moeconv.output.names import MANIFEST_NAME, WORK_FOLDER, kept_name

_SHARD: Final = re.compile(
    r"(weights/weights|restore/restore)-\d{5}-of-\d{5}\.safetensors"
    r"|experts/[^/]+\.\d+-\d+\.safetensors"
)


def remove(root: Path, side_files: Iterable[str]) -> None:
    """Empty a moeconv directory; a crash leaves it unfinished, never whole and never strange.

    Parameters
    ----------
    root
        The directory.
    side_files
        Names that may be side files of an earlier run, where no note of it can be read.

    Raises
    ------
    OutputError
        It is none of ours, holds something else as well, or another run writes there.
    """
    if not check_removable(root, side_files):
        return
    with writing(root):
        (root / WORK_FOLDER).mkdir(exist_ok=True)
        (root / MANIFEST_NAME).unlink(missing_ok=True)
        sync_folder(root)
        for path in sorted(root.iterdir(), key=lambda path: path.name == WORK_FOLDER):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def check_removable(root: Path, side_files: Iterable[str]) -> bool:
    """Return whether there is anything to remove; see `remove`."""
    if root.exists() and not root.is_dir():
        message = f"`{root}` is not a directory"
        raise OutputError(message, hint="give another `--out`")
    if not root.exists() or not any(root.iterdir()):
        return False
    if not (root / MANIFEST_NAME).exists() and not (root / WORK_FOLDER).is_dir():
        message = f"`{root}` is not a moeconv directory, so `--overwrite` does not touch it"
        raise OutputError(message, hint="give another `--out`")
    foreign = sorted(_foreign(root, side_files))
    if foreign:
        message = f"`{root}` holds `{foreign[0]}`, which moeconv did not write"
        raise OutputError(message, hint="move it away, or give another `--out`")
    _check_alone(root)
    return True


def _check_alone(root: Path) -> None:
    """Refuse while another run holds any lock; the system frees those of dead processes."""
    locks = Locks(root)
    for name in locks.names():
        lock = locks.take(name, wait=False)
        if lock is None:
            message = f"another run is writing to `{root}`"
            raise OutputError(message, hint="wait for it, or end it, then overwrite")
        with lock:
            pass


def _foreign(root: Path, side_files: Iterable[str]) -> Iterator[str]:
    """Yield the files of a directory that no conversion wrote there."""
    known = {MANIFEST_NAME, *map(kept_name, side_files), *_noted(root)}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        is_work = path.parts[len(root.parts)] == WORK_FOLDER
        is_ours = name in known or is_work or _SHARD.fullmatch(name)
        if not is_ours and (path.is_symlink() or not path.is_dir()):
            yield name


def _noted(root: Path) -> Iterator[str]:
    """Yield the names that the manifest, or the plan of an unfinished run, has; none if broken."""
    try:
        if (root / MANIFEST_NAME).exists():
            yield from (entry.path for entry in read_manifest(root).files)
        elif (root / WORK_FOLDER / "plan.json").exists():
            plan = read_note(root / WORK_FOLDER / "plan.json", dict[str, str]) or {}
            yield from map(kept_name, plan.get("side files", "").splitlines())
    except VerifyError:
        return
