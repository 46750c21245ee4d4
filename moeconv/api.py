"""What can a program ask? The line as four calls: open, plan, convert, verify; then `serving`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moeconv.checkpoint.hashing import hashed
from moeconv.conversion.budget import Limits, budget_for
from moeconv.conversion.convert import convert as run
from moeconv.conversion.pipeline import Moved
from moeconv.conversion.provenance import note_digests
from moeconv.conversion.survey import check_share, survey_all
from moeconv.kernels import pick
from moeconv.layouts.fingerprint import fingerprint
from moeconv.output.directory import OutputDirectory
from moeconv.output.manifest import Manifest
from moeconv.output.notes import Notes
from moeconv.output.records import ShardRecord
from moeconv.planning.experts import find_experts
from moeconv.planning.identity import check_made_of
from moeconv.planning.plan import Plan, Target, facts_entries, known_facts, plan_for
from moeconv.planning.recognition import pick_family
from moeconv.planning.sidecar import settle
from moeconv.planning.target import Wish, choose_layout, wish_for
from moeconv.sourcing import open_source as open_checkpoint
from moeconv.verification.digests import Subset
from moeconv.verification.verify import Verified
from moeconv.verification.verify import verify as run_verify

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint

__all__ = ["convert", "hash_source", "make_plan", "open_checkpoint", "verify"]

_MOST_LOST = 0.01
"""Share of a layer's block scales that may be lost; the command line can allow more."""


def make_plan(
    checkpoint: Checkpoint,
    layout: str | Wish,
    *,
    tp: int | None = None,
    max_shard_bytes: int = 5 * 10**9,
    family: str | None = None,
) -> Plan:
    """Decide which bytes go where, from headers and config alone.

    Parameters
    ----------
    checkpoint
        An open checkpoint.
    layout
        A layout's name, as `moeconv list` shows it; or a `Wish`, to let the checkpoint choose among
        those of a command, or to say a serving dtype.
    tp
        Make the file for this tensor-parallel size only; `None` for one file for any size.
    max_shard_bytes
        Largest output file, in bytes.
    family
        Take this family's names, whatever `config.json` says.

    Returns
    -------
    Plan
        A job for each output shard: its tensors with final dtypes, shapes and byte offsets, and
        where each expert is read. The same source and arguments give the same `id`.

    Raises
    ------
    SourceError
        The checkpoint contradicts itself.
    UnsupportedError
        No family fits, the layout cannot hold these experts, or a size is no whole number above 0.
    """
    wish = layout if isinstance(layout, Wish) else wish_for(layout)
    found = pick_family(checkpoint, family)
    experts = find_experts(checkpoint, found)
    chosen = choose_layout(wish, experts.stacks, checkpoint.config)
    # The CPU says what the layout's bytes are; any device makes the same.
    prints = fingerprint(chosen, pick("cpu"))
    target = Target(chosen, prints, tp, max_shard_bytes, None, wish.reconciles)
    return plan_for(checkpoint, found, experts, target)


def hash_source(checkpoint: Checkpoint) -> Checkpoint:
    """Read each weight file of a checkpoint whole, for its SHA-256.

    `convert` keeps the digests in the manifest, also in that of a finished conversion. Where the
    Hub or its cache gave one, it is confirmed.

    Parameters
    ----------
    checkpoint
        An open checkpoint.

    Returns
    -------
    Checkpoint
        The same, with the SHA-256 of every weight file.

    Raises
    ------
    SourceError
        A file cannot be read, or is not what the Hub or its cache say it is.
    """
    *_, found = (event for event in hashed(checkpoint) if not isinstance(event, int))
    return found


def convert(
    plan: Plan,
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    device: str = "auto",
    limits: Limits | None = None,
) -> Iterator[Moved | ShardRecord | Manifest]:
    """Convert a checkpoint; the same call resumes.

    Parameters
    ----------
    plan, checkpoint
        What `make_plan` decided, and for which checkpoint.
    out
        The output directory.
    device
        `auto` (a GPU where cores are few), `cpu`, `cuda` or `cuda:N`; the bytes are the same.
    limits
        Threads and bytes of memory; two workers and 1 GiB (2³⁰ bytes) if `None`.

    Yields
    ------
    Moved | ShardRecord | Manifest
        Numbers of bytes as they are done, each shard as it becomes durable, and last the manifest.

    Raises
    ------
    SourceError
        The plan is of another source, or the source changed or cannot be read.
    UnsupportedError
        Above 1 % of a layer's block scales would be lost, the limits do not hold one expert, or
        there is no such device.
    OutputError
        The directory belongs to another plan or cannot be written.
    """
    check_made_of(plan, checkpoint)
    limits, kernels = limits or Limits(2), pick(device)
    budget_for(plan.jobs, limits.beside(limits.ahead_bytes(checkpoint)), kernels)
    root = Path(out)
    kept = Notes.facts_of(root, plan.id)
    if plan.facts is None and kept is not None:
        plan = settle(plan, checkpoint, known_facts(kept))
    if plan.facts is None:
        plan = survey_all(plan, checkpoint)
    known = plan.facts or {}
    check_share(known, _MOST_LOST)
    directory = OutputDirectory(root, plan.id, plan.identity)
    if directory.finished:
        yield note_digests(directory, checkpoint.files)
        return
    directory.notes.keep_facts(facts_entries(known))
    yield from run(plan, checkpoint, directory, kernels, limits)


def verify(
    out: str | Path,
    *,
    read_data: bool = False,
    source: str | Path | None = None,
    device: str = "auto",
) -> Verified:
    """Verify a converted directory: structure always, digests and source if asked.

    Parameters
    ----------
    out
        The converted directory.
    read_data
        Read every byte and compare all digests.
    source
        Invert every tensor and compare it with this checkpoint, byte for byte.
    device
        `auto`, `cpu`, `cuda` or `cuda:N`: what inverts the layout.

    Returns
    -------
    Verified
        How many files, tensors and digests were as they should be, and how many bytes of which
        part the layout cannot give back.

    Raises
    ------
    SourceError
        There is no manifest, or the source cannot be read.
    VerifyError
        Something differs; the message says what and where.
    """
    wanted = Subset() if read_data else None
    for event in run_verify(Path(out), pick(device), read_data=wanted, source=source):
        if isinstance(event, Verified):
            return event
    message = "verification ended without a result"
    raise AssertionError(message)
