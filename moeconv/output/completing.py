"""What makes finished shards a model? A draft of the manifest, and the records' digests in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeconv.errors import VerifyError
from moeconv.output.manifest import Entry, FileEntry, Manifest, RunEntry
from moeconv.output.records import ShardRecord


def complete(
    draft: Manifest, shards: Sequence[ShardRecord], side_files: Sequence[FileEntry], run: RunEntry
) -> Manifest:
    """Return the manifest, from a draft that lacks what only the written shards tell.

    Parameters
    ----------
    draft
        Every entry in its place, without digests.
    shards
        The record of each shard, in the draft's order.
    side_files
        Size and digest of the other files.
    run
        How it went.

    Raises
    ------
    VerifyError
        The records are not of the draft.
    """
    known = {(shard.file, tensor.name): tensor.xxh3 for shard in shards for tensor in shard.tensors}

    def digests(entry: Entry) -> tuple[str, ...]:
        found = known.get((entry.file, entry.name))
        if not found:
            message = f"`{entry.name}` is in no record of `{entry.file}`"
            raise VerifyError(message, hint="the command that converts makes what is missing")
        return found

    kept = tuple(
        replace(entry, xxh3=digests(entry)[0])
        for entry in (draft.restore.kept if draft.restore else ())
    )
    return replace(
        draft,
        restore=draft.restore and replace(draft.restore, kept=kept),
        tensors=tuple(replace(entry, xxh3=digests(entry)) for entry in draft.tensors),
        weights=tuple(replace(entry, xxh3=digests(entry)[0]) for entry in draft.weights),
        files=(*(FileEntry(shard.file, shard.size, shard.sha256) for shard in shards), *side_files),
        sources=tuple(digest for shard in shards for digest in shard.sources),
        run=run,
    )


def together(runs: Sequence[RunEntry]) -> RunEntry:
    """Return how several runs went, as one: sums of bytes, the longest time, the highest peak."""
    return RunEntry(
        device=", ".join(sorted({run.device for run in runs})),
        kernels=", ".join(sorted({run.kernels for run in runs})),
        workers=max((run.workers for run in runs), default=0),
        seconds=max((run.seconds for run in runs), default=0.0),
        bytes_read=sum(run.bytes_read for run in runs),
        bytes_written=sum(run.bytes_written for run in runs),
        peak_rss_bytes=max((run.peak_rss_bytes for run in runs), default=0),
        peak_device_bytes=max((run.peak_device_bytes for run in runs), default=0),
        jobs_resumed=sum(run.jobs_resumed for run in runs),
    )
