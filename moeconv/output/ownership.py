"""Whose is this output directory, and may this plan write there?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from moeconv.errors import OutputError, VerifyError
from moeconv.output.codec import MOST_BYTES, decode, read_manifest
from moeconv.output.names import MANIFEST_NAME, WORK_FOLDER
from moeconv.output.place import check_place
from moeconv.output.removal import check_removable
from moeconv.paths import read_regular

SEE_TO: Final = "see to the disk and what is on it, then run the same command again"
"""What to do where the directory is not what it was when the run began."""

_READABLE_CHARS: Final = 40


def is_finished(root: Path, plan_id: str) -> bool:
    """Return whether a directory is sealed, by this very plan."""
    return (root / MANIFEST_NAME).exists() and read_manifest(root).plan_id == plan_id


def is_begun(root: Path, plan_id: str) -> bool:
    """Return whether a directory holds an unfinished run of this very plan, which can go on."""
    try:
        is_sealed = (root / MANIFEST_NAME).exists()
        return not is_sealed and (noted_plan(root) or {}).get("id") == plan_id
    except (OutputError, OSError):  # a note that nobody can read is of no plan
        return False


def replaces(root: Path, plan_id: str, *, overwrite: bool) -> bool:
    """Say whether `--overwrite` replaces what is there; an unfinished run of the plan goes on."""
    return overwrite and not is_begun(root, plan_id)


def check_output(
    root: Path, plan_id: str, identity: Mapping[str, str], *, overwrite: bool = False
) -> None:
    """Refuse what opening it for this plan would refuse, without writing anything.

    Raises
    ------
    OutputError
        It cannot be written, is not empty and not moeconv's, or holds another plan.
    """
    check_place(root)
    if replaces(root, plan_id, overwrite=overwrite):
        check_removable(root, identity.get("side files", "").splitlines())
        return
    check_plan(root, plan_id, identity)
    if (root / MANIFEST_NAME).exists():
        return
    try:
        check_ours(root)
        if (root / WORK_FOLDER / "plan.json").exists():
            check_begun(root, plan_id, identity)
    except OutputError:  # the folder may have been tidied up under it
        if not (root / MANIFEST_NAME).exists():
            raise
        check_plan(root, plan_id, identity)


def check_begun(root: Path, plan_id: str, identity: Mapping[str, str]) -> None:
    """Refuse a directory in which another plan has begun.

    Raises
    ------
    OutputError
        It is one.
    """
    theirs = noted_plan(root)
    if theirs is None:
        return  # a process of this plan has sealed it and tidied up since it was seen
    if theirs.get("id") != plan_id:
        message = f"`{root}` holds another plan, which differs in "
        message += differences(theirs, identity)
        hint = "give another `--out`, the options it was begun with, or `--overwrite`"
        raise OutputError(message, hint=hint)


def noted_plan(root: Path) -> dict[str, str] | None:
    """Return the plan that has begun in a directory; `None` where there is none.

    Raises
    ------
    OutputError
        The note of it is broken, or the disk does not let it be read.
    """
    path = root / WORK_FOLDER / "plan.json"
    try:
        return decode(read_regular(path, MOST_BYTES), dict[str, str], path.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except VerifyError as error:
        message = f"`{path}` cannot be read as JSON"
        raise OutputError(
            message, hint="give another `--out`, or `--overwrite` to replace it"
        ) from error
    except OSError as error:
        message = f"`{path}` cannot be read: {error.strerror}"
        raise OutputError(message, hint=SEE_TO) from error


def check_plan(root: Path, plan_id: str, identity: Mapping[str, str]) -> None:
    """Refuse a directory that another plan has sealed.

    Raises
    ------
    OutputError
        It is one.
    """
    if not (root / MANIFEST_NAME).exists():
        return
    manifest = read_manifest(root)
    if manifest.plan_id != plan_id:
        message = f"`{root}` holds another conversion, which differs in "
        message += differences(manifest.plan, identity)
        raise OutputError(message, hint="give another `--out`, or `--overwrite` to replace it")


def differences(theirs: Mapping[str, str], mine: Mapping[str, str]) -> str:
    """Say in which parts two plans differ, and how where that can be read."""
    shown = []
    for key in mine:
        there = theirs.get(key, "nothing")
        if there == mine[key]:
            continue
        is_digest = max(len(there), len(mine[key])) > _READABLE_CHARS
        shown.append(key if is_digest else f"{key} ({there} there, {mine[key]} now)")
    return "; ".join(shown)


def check_directory(root: Path) -> None:
    """Refuse a file in the place of a directory.

    Raises
    ------
    OutputError
        It is one.
    """
    if root.exists() and not root.is_dir():
        message = f"`{root}` is not a directory"
        raise OutputError(message)


def check_ours(root: Path) -> None:
    """Refuse what is there and not ours.

    Raises
    ------
    OutputError
        It is no directory, or one with files in it that no run of ours began.
    """
    if not root.exists():
        return
    check_directory(root)
    if not (root / WORK_FOLDER).is_dir() and any(root.iterdir()):
        message = f"`{root}` is not empty and not a moeconv directory"
        raise OutputError(message, hint="give another `--out`; nothing there was touched")
