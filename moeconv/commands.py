"""What each verb does: call the library, hand what comes back to the report."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from moeconv import report
from moeconv.acceptance import check_engines, start_commands
from moeconv.budget import budget_for
from moeconv.checkpoint.index import open_checkpoint
from moeconv.convert import convert
from moeconv.digests import Subset
from moeconv.errors import OutputError, UnsupportedError, VerifyError
from moeconv.experts import find_experts
from moeconv.kernels import pick
from moeconv.options import Options
from moeconv.output.directory import OutputDirectory
from moeconv.output.manifest import Manifest, ShardRecord, read_manifest
from moeconv.output.place import check_apart, check_place
from moeconv.output.remote import RemoteModel, is_repository
from moeconv.pipeline import Moved
from moeconv.plan import Plan, facts_entries, known_facts, plan_for
from moeconv.preview import preview, surveyed, target_of
from moeconv.pushing import Sink, sink_for
from moeconv.recognition import pick_family
from moeconv.restore import Restored, bytes_to_restore, restore
from moeconv.seal import seal
from moeconv.serving import open_converted
from moeconv.sidecar import settle
from moeconv.space import check_space, say_what_is_missing
from moeconv.summary import Finished, show_result
from moeconv.target import Wish, choose_layout, out_name
from moeconv.traits import kinds_of, model_of
from moeconv.uploads import Sent
from moeconv.verify import Verified, bytes_to_move, check_files, verify
from moeconv.verify_remote import compare_source, verify_remote


def run_convert(options: Options, wish: Wish) -> None:
    """Convert, or show the plan."""
    if options.dry_run:
        preview(options, wish)
        return
    share = options.limits.share
    report.lead(share.label, leads=share.leads)
    kernels = pick(options.device)
    checkpoint = open_checkpoint(options.source)
    family = pick_family(checkpoint, options.family)
    experts = find_experts(checkpoint, family)
    layout = choose_layout(wish, experts.stacks, checkpoint.config)
    plan = plan_for(checkpoint, family, experts, target_of(options, wish, layout, kernels))
    out = options.out or Path(out_name(checkpoint.name, layout, options.tp))
    budget_for(plan.jobs, options.limits, kernels)  # refuses a limit before anything is written
    model = model_of(family, checkpoint.config, kinds_of(plan.stacks), checkpoint.tensors)
    for warning in (*plan.warnings, *check_engines(layout, model)):
        report.warn(warning)
    check_apart(out, options.source)
    check_place(out)
    try:
        sink = sink_for(options, plan, out)
        if sink.is_there(checkpoint) or _is_done(plan, out, sink, options):
            return
        started_s = time.monotonic()
        kept = OutputDirectory.kept_facts(out, plan.id)
        if kept is not None:
            plan = settle(plan, checkpoint, known_facts(kept))
        plan = surveyed(plan, checkpoint, options.max_lost_share)
        OutputDirectory.check(out, plan.id, plan.identity, overwrite=options.overwrite)
        jobs, most = options.own_jobs(plan), options.max_disk_bytes
        check_space(out, jobs, overwrite=options.overwrite, most_bytes=most)
        directory = OutputDirectory(out, plan.id, plan.identity, overwrite=options.overwrite)
        directory.keep_facts(facts_entries(plan.facts or {}))
        if options.recheck:
            _recheck(plan, directory)
        sink.adopt(directory, plan)
        events = convert(plan, checkpoint, directory, kernels, options.limits)
        manifest = _drive(sink.along(directory, events), plan, directory, options)
        if manifest is None:
            _show_share(out, options)
            return
        seconds, starts = time.monotonic() - started_s, start_commands(layout, model, out)
        source = None if options.push else options.source
        finished = Finished(source, out, seconds, manifest, starts)
        show_result(plan, finished, as_json=options.as_json)
        sink.finish(manifest)
    except OutputError as problem:
        say_what_is_missing(problem, out, options.own_jobs(plan))
        raise
    except KeyboardInterrupt:
        report.note("interrupted; run the same command again to go on from here")
        sys.exit(130)


def _is_done(plan: Plan, out: Path, sink: Sink, options: Options) -> bool:
    """Say whether nothing is left to convert; then what is left of publishing is done."""
    if options.overwrite or not OutputDirectory.is_finished(out, plan.id):
        return False
    OutputDirectory(out, plan.id, plan.identity)  # tidies up what a crash may have left
    if options.push:
        sink.finish(read_manifest(out))
        return True
    check_files(out, read_manifest(out))
    if options.recheck:
        deque(verify(out, pick("cpu"), read_data=Subset()), maxlen=0)
    report.good(f"`{out}` is already converted with these options; nothing to do")
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


def _recheck(plan: Plan, directory: OutputDirectory) -> None:
    for number, job in enumerate(plan.jobs):
        if directory.drop_damaged(number, job.file):
            report.warn(f"`{job.file}` is damaged, and is done again")


def _show_share(out: Path, options: Options) -> None:
    """Say that a share is done, and what is left to do."""
    label = options.limits.share.label
    report.good(f"share {label} is done in `{out}`")
    then = f"moeconv seal {out}, when all shares are there"
    if options.push:
        then = "the same command without --shard-of, when all shares are on the Hub"
    report.table("", [("next", then)])
    if options.as_json:
        report.emit({"event": "share", "out": str(out), "share": label})


def run_seal(out: Path, *, as_json: bool) -> None:
    """Join shares, and say what was made."""
    manifest = seal(out)
    if as_json:
        report.emit({"event": "done", "out": str(out), "plan_id": manifest.plan_id})
        return
    report.good(f"`{out}` is whole: {len(manifest.files)} files")
    report.table("", [("next", f"moeconv verify {out} --read-data")])


def _done_bytes(plan: Plan, numbers: Iterable[int], directory: OutputDirectory) -> int:
    jobs = ((number, plan.jobs[number]) for number in numbers)
    return sum(job.nbytes for number, job in jobs if directory.record(number, job.file))


def run_verify(
    where: str, *, read_data: Subset | None, source: Path | None, device: str, as_json: bool
) -> None:
    """Verify a directory or a repository, and say what was found."""
    root, result = Path(where), None
    if is_repository(where) and not root.exists():
        if source is not None:
            message = f"`{where}` is on the Hub, and is not compared with a checkpoint from here"
            raise UnsupportedError(message, hint="`hf download` it, then compare the copy")
        model = RemoteModel(where)
        manifest, where = model.manifest, f"{model.name}@{model.commit}"
        events = verify_remote(model, read_data=read_data)
    else:
        manifest = read_manifest(root)
        events = verify(root, pick(device), read_data=read_data, source=source)
    total = bytes_to_move(manifest, read_data=read_data, source=source is not None)
    with report.progress() as bar:
        task = bar.add_task("verifying", total=total)
        for event in events:
            if isinstance(event, Verified):
                result = event
            else:
                bar.advance(task, event.nbytes)
    if result is None:
        message = "verification ended without a result"
        raise VerifyError(message)
    if as_json:
        left_out = {"left_out": manifest.left_out}
        report.emit({"event": "verified", "out": where, **asdict(result), **left_out})
        return
    if read_data or source:
        report.good(f"`{where}` is as its manifest says")
    else:
        report.good(f"`{where}` has the files and headers its manifest says; data not read")
    report.table(
        "",
        (
            ("files", f"{result.files} of the right size, {result.tensors} tensors in place"),
            ("digests", _digests(result.digests, read_data)),
            (
                "source",
                f"{result.sources} tensors compared, byte for byte"
                if source
                else "not compared (--source SRC)",
            ),
            *(
                (f"lost of {part}", f"{count} bytes; the rest is right")
                for part, count in result.lost.items()
            ),
            *(
                ("left out", f"{count} {part} tensors, which the kernel does not read")
                for part, count in manifest.left_out.items()
            ),
        ),
    )


def _digests(equal: int, subset: Subset | None) -> str:
    if subset is None:
        return "not read (--read-data)"
    part = f", part {subset.part} of {subset.of}" if subset.of > 1 else ""
    return f"{equal} equal{part}"


def run_compare_source(where: str, *, as_json: bool) -> None:
    """Compare the digests of the source that are kept with those that the Hub has of it."""
    is_here = Path(where).exists() or not is_repository(where)
    manifest = read_manifest(Path(where)) if is_here else RemoteModel(where).manifest
    count, source = compare_source(manifest), manifest.source
    if as_json:
        name = f"{source.name}@{source.revision}"
        report.emit({"event": "source compared", "source": name, "files": count})
        return
    report.good(f"`{source.name}` has the {count} files that were converted, by their SHA-256")


def run_rank(root: Path, *, tp: tuple[int, int], ep: tuple[int, int], as_json: bool) -> None:
    """Show what a rank reads."""
    with open_converted(root, allow_partial=True) as converted:
        view = converted.rank(tp_size=tp[0], tp_rank=tp[1], ep_size=ep[0], ep_rank=ep[1])
        if as_json:
            for tensor in view.tensors():
                report.emit(
                    {
                        "prefix": tensor.prefix,
                        "param": tensor.param,
                        "dtype": tensor.spec.dtype,
                        "shape": list(tensor.spec.shape),
                        "bytes": tensor.nbytes,
                        "read_bytes": tensor.read_bytes,
                    }
                )
            return
        rows = [
            (
                str(tensor.layer),
                tensor.param,
                str(tensor.spec),
                f"{tensor.experts.start}-{tensor.experts.stop - 1}",
                report.size(tensor.placement.end - tensor.placement.begin),
            )
            for tensor in view.tensors()
        ]
        title = f"TP rank {tp[1]} of {tp[0]}, EP rank {ep[1]} of {ep[0]}"
        report.grid(title, ("layer", "parameter", "shape", "experts", "bytes an expert"), rows)
        reads = sum(tensor.read_bytes for tensor in view.tensors())
        held = sum(entry.end - entry.begin for entry in converted.manifest.tensors)
        report.note(
            f"this rank reads {report.size(reads)} of {report.size(held)} of experts: 1 of "
            f"{ep[0]} shares of the experts, and of each the part of 1 of {tp[0]} ranks"
        )
        if converted.manifest.partial:
            report.warn(f"`{root}` holds only {converted.manifest.partial} of the model")


def run_restore(root: Path, out: Path, *, device: str, as_json: bool) -> None:
    """Write the source back, and say what was written."""
    result: Restored | None = None
    with report.progress() as bar:
        task = bar.add_task("restoring", total=bytes_to_restore(read_manifest(root)))
        for event in restore(root, pick(device), out):
            if isinstance(event, Restored):
                result = event
            else:
                bar.advance(task, event.nbytes)
    if result is None:
        message = "restoring ended without a result"
        raise AssertionError(message)
    if as_json:
        report.emit({"event": "restored", "out": str(out), **asdict(result)})
        return
    report.good(f"restored to `{out}`: every byte is as it was converted")
    there = f", {result.resumed} of which were there" if result.resumed else ""
    report.table(
        "",
        (
            ("weights", f"{result.files} files and indexes, {report.size(result.nbytes)}{there}"),
            ("side files", str(result.side_files)),
        ),
    )
