"""Is there room for what is still to be written?"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeconv import report
from moeconv.errors import OutputError
from moeconv.output.durable import writing
from moeconv.output.names import WORK_FOLDER
from moeconv.output.place import free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from moeconv.planning.jobs import Job
    from moeconv.planning.plan import Plan

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""What a system says of a disk without room, and of a person without quota."""


def check_space(
    out: Path, jobs: Iterable[Job], *, overwrite: bool, most_bytes: int | None = None
) -> None:
    """Refuse to begin what cannot end.

    Parameters
    ----------
    out, jobs
        Where the shards of these jobs go.
    overwrite
        Whether what is there goes first.
    most_bytes
        How much of it is there at a time, where not all is.

    Raises
    ------
    OutputError
        The disk has less room than the jobs still need.
    """
    with writing(out):
        needed, free = needed_bytes(out, jobs, overwrite=overwrite), free_bytes(out)
        if most_bytes is not None:
            needed = min(needed, most_bytes)
        # What an interrupted run left unfinished gives its room back; `--overwrite`, everything.
        free += _held_bytes(out if overwrite else out / WORK_FOLDER / "tmp")
    if free < needed:
        message = f"`{out}` has {report.size(free)} free, but {report.size(needed)} are needed"
        raise OutputError(message, hint="make space, or give an `--out` on another disk")


def check_bound(plan: Plan, most_bytes: int | None, *, is_pushed: bool) -> int:
    """Refuse a bound on the disk that a conversion cannot keep; return its largest shard's bytes.

    Parameters
    ----------
    plan
        What is made.
    most_bytes
        The bound, if there is one.
    is_pushed
        Whether shards go away, to the Hub, while others are made.

    Raises
    ------
    OutputError
        Nothing goes away and all of it is larger, or one shard is.
    """
    sizes = {job.file: job.arranged(plan.id).size for job in plan.jobs}
    largest = max(sizes, key=lambda file: sizes[file])
    if most_bytes is None:
        return sizes[largest]
    if not is_pushed and plan.nbytes > most_bytes:
        message = f"{report.size(plan.nbytes)} would be on disk, more than `--max-disk`"
        raise OutputError(message, hint="with `--push ORG/NAME`, shards on the Hub are removed")
    if sizes[largest] > most_bytes:
        message = (
            f"`--max-disk` {report.size(most_bytes)} does not hold `{largest}`, "
            f"which takes {report.size(sizes[largest])}"
        )
        raise OutputError(message, hint="give more, or a smaller `--max-shard-size`")
    return sizes[largest]


def needed_bytes(out: Path, jobs: Iterable[Job], *, overwrite: bool = False) -> int:
    """Return the bytes of all shards that are not there yet; side files are small beside them."""
    return sum(job.nbytes for job in jobs if overwrite or not (out / job.file).exists())


@contextlib.contextmanager
def telling_what_is_missing(out: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Add to the error of a full disk, inside the block, how many bytes are still needed.

    Raises
    ------
    OutputError
        The disk, or the person's part of it, is full; any other error stays as it is.
    """
    try:
        yield
    except OutputError as problem:
        cause = problem.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _FULL:
            raise
        missing = needed()
        size = f"{report.size(missing)} are still" if missing else "only small files are"
        left = f"{size} to be written"
        # Of a quota, the system says no more than that it is used up.
        free = "" if cause.errno == errno.EDQUOT else f", {report.size(free_bytes(out))} are free"
        raise OutputError(f"{problem}; {left}{free}", hint=problem.hint) from problem


def _held_bytes(folder: Path) -> int:
    """Return what the files of a folder hold; another process may be removing them."""
    held = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                held += (Path(parent) / name).lstat().st_blocks * 512
    return held
