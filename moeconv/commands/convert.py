"""What do the commands that convert do? Decide everything, then convert and show it as it goes."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moeconv import report
from moeconv.checkpoint.hashing import hashed
from moeconv.commands.options import Options
from moeconv.commands.preview import began_with, surveyed, target_of
from moeconv.commands.recheck import recheck, recheck_finished
from moeconv.commands.sink import Sink, sink_for
from moeconv.commands.space import check_space, needed_bytes, telling_what_is_missing
from moeconv.commands.summary import Finished, show_result
from moeconv.conversion.budget import budget_for
from moeconv.conversion.convert import convert
from moeconv.conversion.pipeline import Moved
from moeconv.conversion.provenance import note_digests
from moeconv.kernels import pick
from moeconv.output.codec import read_manifest
from moeconv.output.directory import OutputDirectory
from moeconv.output.manifest import Manifest
from moeconv.output.notes import Notes
from moeconv.output.ownership import check_output, is_finished, replaces
from moeconv.output.place import check_apart, check_place, errors_below
from moeconv.output.records import Asked, ShardRecord
from moeconv.planning.acceptance import check_engines, start_commands
from moeconv.planning.experts import find_experts
from moeconv.planning.plan import Plan, facts_entries, known_facts, plan_for
from moeconv.planning.recognition import pick_family
from moeconv.planning.sidecar import settle
from moeconv.planning.target import Wish, choose_layout, out_name
from moeconv.planning.traits import kinds_of, model_of
from moeconv.publishing.sent import Sent
from moeconv.shell import typed
from moeconv.sourcing import is_local, open_source
from moeconv.verification.structure import check_files

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.layouts.verbs import Kernels


@dataclass(frozen=True, slots=True)
class _Decided:
    """What will be converted, to where, and how it is served then."""

    checkpoint: Checkpoint
    plan: Plan
    out: Path
    starts: tuple[str, ...]


def run_convert(options: Options, wish: Wish) -> None:
    """Convert, and show it as it goes."""
    share = options.limits.share
    report.lead(share.label, leads=share.leads)
    kernels = pick(options.device)
    decided = _decide(options, wish, kernels)
    try:
        with errors_below(decided.out):
            _convert(decided, options, kernels)
    except KeyboardInterrupt:
        report.note("interrupted; run the same command again to go on from here")
        sys.exit(130)


def _decide(options: Options, wish: Wish, kernels: Kernels) -> _Decided:
    """Look at the checkpoint; refuse what can be refused before anything is written."""
    checkpoint = open_source(options.source, keep=options.keep_source)
    for note in checkpoint.notes:
        report.note(note)
    family = pick_family(checkpoint, options.family)
    experts = find_experts(checkpoint, family)
    layout = choose_layout(wish, experts.stacks, checkpoint.config)
    out = options.out or Path(out_name(checkpoint.name, layout, options.tp))
    if began := began_with(checkpoint, out, options):
        return _decide(began, wish, kernels)
    plan = plan_for(checkpoint, family, experts, target_of(options, wish, layout, kernels))
    budget_for(plan.jobs, options.limits.beside(options.limits.ahead_bytes(checkpoint)), kernels)
    model = model_of(family, checkpoint.config, kinds_of(plan.stacks), checkpoint.tensors)
    for warning in (*plan.warnings, *check_engines(layout, model)):
        report.warn(warning)
    if is_local(options.source):
        check_apart(out, Path(options.source))
    check_place(out)
    return _Decided(checkpoint, plan, out, start_commands(layout, model, out))


def _convert(decided: _Decided, options: Options, kernels: Kernels) -> None:
    """Do what is left to do, and say what became of it."""
    checkpoint, plan, out = decided.checkpoint, decided.plan, decided.out
    sink = sink_for(options, plan, out)
    if sink.is_there(checkpoint):
        if options.hash_source:
            report.note("`--hash-source` reads nothing then: what is on the Hub stays as it is")
        return
    if _is_done(decided, sink, options):
        return
    started_s = time.monotonic()
    kept = Notes.facts_of(out, plan.id) or sink.known_facts()
    if kept is not None:
        plan = settle(plan, checkpoint, known_facts(kept))
    plan = surveyed(plan, checkpoint, options.max_lost_share)
    with telling_what_is_missing(out, lambda: needed_bytes(out, options.own_jobs(plan))):
        manifest = _fill(replace(decided, plan=plan), sink, options, kernels)
    if manifest is None:
        _show_share(out, options)
        return
    source = None if options.push else checkpoint.origin.where
    seconds = time.monotonic() - started_s
    show_result(
        plan, Finished(source, out, seconds, manifest, decided.starts), as_json=options.as_json
    )
    sink.finish(manifest)


def _fill(decided: _Decided, sink: Sink, options: Options, kernels: Kernels) -> Manifest | None:
    """Convert, as far as it was asked for; the manifest where that is all of it."""
    checkpoint, plan, out = decided.checkpoint, decided.plan, decided.out
    overwrite = replaces(out, plan.id, overwrite=options.overwrite)
    check_output(out, plan.id, plan.identity, overwrite=overwrite)
    jobs, most = options.own_jobs(plan), options.max_disk_bytes
    check_space(out, jobs, overwrite=overwrite, most_bytes=most)
    if options.overwrite and not overwrite:
        report.note(f"`{out}` holds an unfinished run of this very plan, which goes on")
    directory = OutputDirectory(out, plan.id, plan.identity, overwrite=overwrite)
    directory.notes.keep_facts(facts_entries(plan.facts or {}))
    origin = checkpoint.origin
    if origin.repo and origin.commit and checkpoint.asked:
        directory.notes.keep_asked(Asked(origin.repo, checkpoint.asked, origin.commit))
    if options.recheck:
        recheck(directory, [job.file for job in plan.jobs], "is done again")
    sink.adopt(directory, plan)
    if options.hash_source:
        checkpoint = _hashed(checkpoint)
    with _settled():
        events = convert(plan, checkpoint, directory, kernels, options.limits)
        return _drive(sink.along(directory, events), plan, directory, options)


@contextmanager
def _settled() -> Iterator[None]:
    """Spare the garbage collector what is there by now, while the block runs.

    It would look through the tables of the plan again and again, and all threads would wait. A
    program that calls `convert` decides that for itself: what it drops meanwhile would stay.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _hashed(checkpoint: Checkpoint) -> Checkpoint:
    """Read the source's files for their SHA-256."""
    with report.progress() as bar:
        total = sum(file.size for file in checkpoint.files)
        task = bar.add_task("hashing the source", total=total)
        for event in hashed(checkpoint):
            if not isinstance(event, int):
                return event
            bar.advance(task, event)
    return checkpoint


def _is_done(decided: _Decided, sink: Sink, options: Options) -> bool:
    """Say whether nothing is left to convert; then what is left beside it is done."""
    plan, out = decided.plan, decided.out
    if options.overwrite or not is_finished(out, plan.id):
        return False
    directory = OutputDirectory(out, plan.id, plan.identity)  # tidies up what a crash left
    if options.hash_source:
        note_digests(directory, _hashed(decided.checkpoint).files)
    if options.push:
        sink.finish(read_manifest(out))
        return True
    check_files(out, read_manifest(out))
    if options.recheck:
        recheck_finished(out)
    done = "the SHA-256 of its source is noted" if options.hash_source else "nothing to do"
    report.good(f"`{out}` is already converted with these options; {done}")
    if options.as_json:
        report.emit({"event": "done", "out": str(out), "plan_id": plan.id})
    return True


def _drive(
    events: Iterable[Moved | Sent | ShardRecord | Manifest],
    plan: Plan,
    directory: OutputDirectory,
    options: Options,
) -> Manifest | None:
    own = options.limits.share.jobs(len(plan.jobs))
    manifest: Manifest | None = None
    with report.progress() as bar:
        task = bar.add_task(
            "converting",
            total=sum(plan.jobs[number].nbytes for number in own),
            completed=_done_bytes(plan, own, directory),
        )
        sent = bar.add_task("sending", total=plan.nbytes, visible=options.push is not None)
        for event in events:
            match event:
                case Moved(nbytes):
                    bar.advance(task, nbytes)
                case Sent(nbytes):
                    bar.advance(sent, nbytes)
                case ShardRecord():
                    if options.as_json:
                        shard = {"file": event.file, "size": event.size, "sha256": event.sha256}
                        report.emit({"event": "shard", **shard})
                case Manifest():
                    manifest = event
    return manifest


def _done_bytes(plan: Plan, numbers: Iterable[int], directory: OutputDirectory) -> int:
    jobs = ((number, plan.jobs[number]) for number in numbers)
    return sum(job.nbytes for number, job in jobs if directory.record(number, job.file))


def _show_share(out: Path, options: Options) -> None:
    """Say that a share is done, and what is left to do."""
    label = options.limits.share.label
    report.good(f"share {label} is done in `{out}`")
    then = f"moeconv seal {typed(out)}  # when all shares are there"
    if options.push:
        then = "the same command without --shard-of, when all shares are on the Hub"
    report.table("", (), commands=[("next", then)])
    if options.as_json:
        report.emit({"event": "share", "out": str(out), "share": label})
