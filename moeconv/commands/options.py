"""What did the person ask of a conversion, beside the layout?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moeconv.share import Share, launched

if TYPE_CHECKING:
    from moeconv.conversion.budget import Limits
    from moeconv.output.hub import Destination
    from moeconv.planning.jobs import Job
    from moeconv.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What all commands that convert take; `cli.options` has a row for each field that has a flag.

    Attributes
    ----------
    source
        The checkpoint: a directory, a repository of the Hub, or a model's name.
    keep_source
        Fetch a repository whole, into the library's cache.
    out
        The output directory; `None` for one named after source and layout.
    tp
        Make the file for this tensor-parallel size only.
    device
        `auto`, `cpu`, `cuda` or `cuda:N`.
    max_host_bytes
        Bound on all buffers together.
    max_device_bytes
        Bound on the buffers on a GPU.
    max_shard_bytes
        Largest output file.
    layers
        Convert only these.
    workers
        Threads that read, lay out and write; `None` for as many as the machine keeps busy.
    family
        Take this family's names, whatever `config.json` says.
    share
        Do this part of the jobs only, and do not seal; `None` for all, together with other
        processes.
    dry_run
        Show the plan, write nothing.
    sidecar
        Keep what restoring the source needs.
    overwrite
        Replace what moeconv wrote to `out`, unless that is an unfinished run of the same plan.
    recheck
        Read the shards of an earlier run again, and do the damaged ones again.
    hash_source
        Read each source file whole, for its SHA-256.
    as_json
        JSON lines to stdout.
    max_lost_share
        Refuse a layer that loses more of its block scales, 0 to 1.
    push, private, revision, create_pr
        Publish to this repository on the Hub; see `Destination`.
    max_disk_bytes
        Remove shards that are on the Hub, so that those here stay below this.
    """

    source: str
    keep_source: bool = False
    out: Path | None = None
    tp: int | None = None
    device: str = "auto"
    max_host_bytes: int = 1 << 30
    max_device_bytes: int = 1 << 30
    max_shard_bytes: int = 5 * 10**9
    layers: range | None = None
    workers: int | None = None
    family: str | None = None
    share: Share | None = None
    dry_run: bool = False
    sidecar: bool = True
    overwrite: bool = False
    recheck: bool = False
    hash_source: bool = False
    as_json: bool = False
    max_lost_share: float = 0.01
    push: str | None = None
    private: bool = False
    revision: str = "main"
    create_pr: bool = False
    max_disk_bytes: int | None = None

    def own_jobs(self, plan: Plan) -> list[Job]:
        """Return the jobs that this process is asked to do."""
        return [plan.jobs[number] for number in self.limits.share.jobs(len(plan.jobs))]

    @property
    def limits(self) -> Limits:
        """How much of the machine to use."""
        from moeconv.conversion.budget import Limits, default_workers

        # On a bounded disk one shard at a time: the next waits until there is room for it.
        shards = None if self.max_disk_bytes is None else 1
        share, workers = self.share or launched(), self.workers or default_workers()
        return Limits(workers, self.max_host_bytes, self.max_device_bytes, share, shards)

    @property
    def destination(self) -> Destination | None:
        """Where on the Hub the result goes; `None` to keep it here."""
        if self.push is None:
            return None
        from moeconv.output.hub import Destination

        return Destination(self.push, self.revision, self.private, self.create_pr)
