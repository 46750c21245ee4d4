"""The line: for each job read, lay out, write, record; when all are done, seal."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from moeconv.checkpoint.reader import reader_for
from moeconv.conversion.abreast import abreast
from moeconv.conversion.describe import draft
from moeconv.conversion.estimate import peak_rss_bytes
from moeconv.conversion.pipeline import Moved, Pipeline
from moeconv.conversion.survey import survey_all
from moeconv.output.completing import complete
from moeconv.output.directory import OutputDirectory
from moeconv.output.manifest import Manifest, RunEntry
from moeconv.output.names import kept_name
from moeconv.output.records import ShardRecord
from moeconv.planning.identity import check_made_of

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.conversion.budget import Limits
    from moeconv.layouts.verbs import Kernels
    from moeconv.planning.jobs import Job
    from moeconv.planning.plan import Plan

_POLL_S: Final = 0.2


@dataclass(slots=True)
class _Run:
    """What is known of this process's run so far.

    Attributes
    ----------
    known, resumed
        Jobs that were done when it began, and all that it found done.
    foreign
        Bytes of each job that another process did meanwhile.
    """

    device: str
    kernels: str
    workers: int
    started_s: float = field(default_factory=time.monotonic)
    bytes_read: int = 0
    bytes_written: int = 0
    peak_device_bytes: int = 0
    resumed: list[int] = field(default_factory=list)
    known: frozenset[int] = frozenset()
    foreign: list[int] = field(default_factory=list)

    def entry(self) -> RunEntry:
        """Return the run as the manifest keeps it."""
        return RunEntry(
            device=self.device,
            kernels=self.kernels,
            workers=self.workers,
            seconds=round(time.monotonic() - self.started_s, 3),
            bytes_read=self.bytes_read,
            bytes_written=self.bytes_written - sum(self.foreign),
            peak_rss_bytes=peak_rss_bytes(),
            peak_device_bytes=self.peak_device_bytes,
            jobs_resumed=len(self.resumed),
        )


def convert(
    plan: Plan,
    checkpoint: Checkpoint,
    directory: OutputDirectory,
    kernels: Kernels,
    limits: Limits,
) -> Iterator[Moved | ShardRecord | Manifest]:
    """Convert a checkpoint into a directory that belongs to the plan.

    Yields bytes as they are done, here or by another process, the record of each shard as it
    becomes durable (also of those that were there), and the manifest once the directory is whole.
    Where this process is to do only a share of the jobs, there is no manifest: `seal` makes it of
    all shares.

    Raises
    ------
    SourceError
        The plan is of another source, or the source changed or cannot be read.
    UnsupportedError
        The memory limit does not hold one expert.
    OutputError
        The directory cannot be written.
    """
    check_made_of(plan, checkpoint)
    if plan.facts is None:
        plan = survey_all(plan, checkpoint)
    with directory.present():
        yield from _convert(plan, checkpoint, directory, kernels, limits)
        if not limits.share.only:
            directory.clean()
    if not limits.share.only:
        yield directory.manifest()


def _convert(
    plan: Plan,
    checkpoint: Checkpoint,
    directory: OutputDirectory,
    kernels: Kernels,
    limits: Limits,
) -> Iterator[Moved | ShardRecord]:
    """Do every job that is left of this process's share, then seal if it is all of them."""
    made = draft(plan, checkpoint)
    directory.notes.keep_draft(made)
    run = _Run(kernels.device, kernels.name, limits.workers)
    records: dict[str, ShardRecord] = {}
    ahead_bytes = limits.ahead_bytes(checkpoint)
    with (
        reader_for(checkpoint, ahead_bytes // limits.shards) as reader,
        Pipeline(reader, kernels, plan, limits.beside(ahead_bytes)) as pipeline,
    ):
        jobs = enumerate(plan.jobs)
        run.known = frozenset(n for n, job in jobs if directory.record(n, job.file))
        waiting = limits.share.jobs(len(plan.jobs))
        while waiting and not directory.is_sealed():
            before = len(waiting)
            streams = (_do(plan.jobs[n], n, directory, pipeline, run) for n in waiting)
            for event in abreast(streams, limits.shards):
                if isinstance(event, ShardRecord):
                    records[event.file] = event
                else:
                    run.bytes_written += event.nbytes
                yield event
            waiting = [n for n in waiting if plan.jobs[n].file not in records]
            if len(waiting) == before:
                time.sleep(_POLL_S)  # the rest is being done by other processes
        run.bytes_read = reader.bytes_read
        run.peak_device_bytes = pipeline.peak_device_bytes
    if limits.share.only:
        if directory.is_sealed():
            return  # somebody joined the shares as soon as the last record was there
        directory.copy_side_files(checkpoint.origin.chunks, checkpoint.side_files)
        directory.notes.add_run(limits.share.label.replace("/", "-of-"), run.entry())
        return
    with directory.sealing() as is_mine:
        if is_mine:
            directory.copy_side_files(checkpoint.origin.chunks, checkpoint.side_files)
            side = [directory.file_entry(kept_name(name)) for name in checkpoint.side_files]
            shards = [records[job.file] for job in plan.jobs]
            directory.seal(complete(made, shards, side, run.entry()))


def _do(
    job: Job, number: int, directory: OutputDirectory, pipeline: Pipeline, run: _Run
) -> Generator[Moved | ShardRecord, None, None]:
    """Do a job, unless it is done or another process does it; the record says that it is done."""
    with directory.claim(number) as is_mine:
        if not is_mine or directory.is_sealed():
            return
        record = directory.record(number, job.file)
        if record is not None:
            if number in run.known:
                run.resumed.append(number)
            else:
                run.foreign.append(job.nbytes)
                yield Moved(job.nbytes)  # by another process: whoever watches sees all of it
            yield record
            return
        if directory.is_sealed():
            return  # since it was asked: the record went with the other notes
        temporary, final = directory.temporary(number), directory.root / job.file
        for event in pipeline.fill(job, temporary, final):
            if isinstance(event, ShardRecord):
                directory.add_record(number, event)
            yield event
