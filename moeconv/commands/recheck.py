"""Do finished shards still have the bytes that they were given? Read again, where it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moeconv import report
from moeconv.conversion.pipeline import Moved
from moeconv.kernels import pick
from moeconv.output.codec import read_manifest
from moeconv.output.directory import OutputDirectory
from moeconv.verification.digests import Subset
from moeconv.verification.verify import bytes_to_move, verify


def recheck(directory: OutputDirectory, files: Sequence[str], outcome: str) -> None:
    """Read the finished shards of a conversion again, and forget those with other bytes.

    Parameters
    ----------
    directory
        Where they are; it is not sealed.
    files
        The shard of each job, in order.
    outcome
        What becomes of a damaged one, in words.
    """
    found = (directory.record(number, file) for number, file in enumerate(files))
    sizes = {record.file: record.size for record in found if record}
    with report.progress() as bar:
        task = bar.add_task("reading again", total=sum(sizes.values()))
        for number, file in enumerate(files):
            if directory.drop_damaged(number, file):
                report.warn(f"`{file}` is damaged, and {outcome}")
            bar.advance(task, sizes.get(file, 0))


def recheck_finished(out: Path) -> None:
    """Read a finished conversion again.

    Raises
    ------
    VerifyError
        A digest differs.
    """
    everything = Subset()
    total = bytes_to_move(read_manifest(out), read_data=everything, source=False)
    with report.progress() as bar:
        task = bar.add_task("reading again", total=total)
        for event in verify(out, pick("cpu"), read_data=everything):
            if isinstance(event, Moved):
                bar.advance(task, event.nbytes)
