"""What each verb does: call the library, hand what comes back to the report."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moeconv import report
from moeconv.checkpoint.index import open_checkpoint
from moeconv.convert import convert
from moeconv.errors import OutputError, VerifyError
from moeconv.kernels import pick
from moeconv.layouts import LAYOUTS
from moeconv.layouts.fingerprint import fingerprint
from moeconv.output.directory import OutputDirectory
from moeconv.output.manifest import Manifest, ShardRecord, read_manifest
from moeconv.pipeline import Limits, Moved, slot_sizes
from moeconv.plan import Converted, Plan, Target, make_plan, served_tp
from moeconv.serving import open_converted
from moeconv.verify import Verified, bytes_to_move, verify

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint


@dataclass(frozen=True, slots=True)
class Options:
    """What the person asked of a conversion."""

    source: Path
    out: Path | None
    layout: str
    tp: int | None
    device: str
    max_host_bytes: int
    max_shard_bytes: int
    layers: tuple[int, int] | None
    workers: int
    family: str | None
    dry_run: bool
    overwrite: bool
    as_json: bool


def run_convert(options: Options) -> None:
    """Convert, or show the plan."""
    kernels = pick(options.device)
    checkpoint = open_checkpoint(options.source)
    layout = next(layout for layout in LAYOUTS if layout.id == options.layout)
    target = Target(
        layout,
        fingerprint(layout, kernels),
        options.tp,
        options.max_shard_bytes,
        options.layers,
    )
    plan = make_plan(checkpoint, target, options.family)
    limits = Limits(options.workers, options.max_host_bytes)
    out = options.out or Path(f"{checkpoint.name}-{layout.id}")
    for warning in plan.warnings:
        report.warn(warning)
    if options.dry_run:
        _show_plan(plan, checkpoint, out, limits, as_json=options.as_json)
        return
    slot_sizes(plan.jobs, limits)  # refuses a limit that is too small before anything is written
    directory = OutputDirectory(out, plan.id, plan.identity, overwrite=options.overwrite)
    if directory.finished:
        report.good(f"`{out}` is already converted, by this very plan; nothing to do")
        return
    done = sum(
        job.nbytes
        for number, job in enumerate(plan.jobs)
        if directory.record(number, job.file) is not None
    )
    _check_space(out, plan.nbytes - done)
    started_s = time.monotonic()
    try:
        manifest = _drive(plan, checkpoint, directory, options, done)
    except KeyboardInterrupt:
        report.note("interrupted; run the same command again to go on from here")
        raise
    _show_result(plan, manifest, out, time.monotonic() - started_s, as_json=options.as_json)


def _drive(
    plan: Plan,
    checkpoint: Checkpoint,
    directory: OutputDirectory,
    options: Options,
    done: int,
) -> Manifest:
    limits = Limits(options.workers, options.max_host_bytes)
    kernels = pick(options.device)
    with report.progress() as bar:
        task = bar.add_task("converting", total=plan.nbytes, completed=done)
        for event in convert(plan, checkpoint, directory, kernels, limits):
            match event:
                case Moved(nbytes):
                    bar.advance(task, nbytes)
                case ShardRecord():
                    if options.as_json:
                        shard = {"file": event.file, "size": event.size, "sha256": event.sha256}
                        report.emit({"event": "shard", **shard})
                case Manifest():
                    return event
    message = "the conversion ended without a manifest"
    raise AssertionError(message)


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if free < needed:
        message = f"`{out}` has {report.size(free)} free, but {report.size(needed)} are needed"
        raise OutputError(message, hint="make space, or give an `--out` on another disk")


def _show_plan(
    plan: Plan, checkpoint: Checkpoint, out: Path, limits: Limits, *, as_json: bool
) -> None:
    slot = sum(slot_sizes(plan.jobs, limits))
    slots = min(limits.workers + 2, limits.max_host_bytes // slot)
    expert_bytes = sum(
        tensor.spec.nbytes
        for job in plan.jobs
        for tensor in job.tensors
        if isinstance(tensor, Converted)
    )
    existing = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    facts = {
        "source": str(checkpoint.root),
        "out": str(out),
        "family": plan.family.name,
        "layout": plan.target.layout.id,
        "layers": len(plan.stacks),
        "experts": plan.stacks[0].geometry.experts,
        "hidden": plan.stacks[0].geometry.hidden,
        "intermediate": plan.stacks[0].geometry.intermediate,
        "tp": plan.target.tp,
        "tp_sizes": _tp_sizes(plan),
        "shards": len(plan.jobs),
        "expert_bytes": expert_bytes,
        "other_bytes": plan.nbytes - expert_bytes,
        "other_experts": plan.extra_experts,
        "buffer_bytes": slot * slots,
        "free_bytes": shutil.disk_usage(existing).free,
        "warnings": list(plan.warnings),
    }
    if as_json:
        report.emit({"event": "plan", **facts})
        return
    geometry = plan.stacks[0].geometry
    report.table(
        f"plan for {checkpoint.name}",
        (
            ("family", plan.family.name),
            ("layout", f"{plan.target.layout.id} → {out}"),
            ("experts", f"{len(plan.stacks)} layers × {geometry.experts}"),
            ("sizes", f"hidden {geometry.hidden}, intermediate {geometry.intermediate}"),
            ("serves", _serves(plan)),
            ("shards", f"{len(plan.jobs)}, {report.size(plan.nbytes)}"),
            ("of it experts", report.size(expert_bytes)),
            ("passes through", report.size(plan.nbytes - expert_bytes)),
            *_extra(plan),
            ("buffers", report.size(slot * slots)),
            ("free disk", report.size(shutil.disk_usage(existing).free)),
        ),
        to_stdout=True,
    )


def _tp_sizes(plan: Plan) -> list[int]:
    if plan.target.tp is not None:
        return [plan.target.tp]
    sizes = (set(served_tp(plan.target.layout, stack.geometry)) for stack in plan.stacks)
    return sorted(set.intersection(*sizes))


def _serves(plan: Plan) -> str:
    served = ", ".join(str(size) for size in _tp_sizes(plan))
    if plan.target.tp is not None:
        return f"TP {served} only, in the engine's order; any EP"
    return f"TP {served}; any EP that divides the experts"


def _extra(plan: Plan) -> tuple[tuple[str, str], ...]:
    if not plan.extra_experts:
        return ()
    return (
        ("left as they are", f"{plan.extra_experts} expert tensors outside the main model (MTP)"),
    )


def _show_result(
    plan: Plan, manifest: Manifest, out: Path, seconds: float, *, as_json: bool
) -> None:
    run = manifest.run
    rate = run.bytes_written / seconds if seconds else 0.0
    if as_json:
        report.emit({"event": "done", "out": str(out), "plan_id": plan.id, **asdict(run)})
        return
    report.good(f"converted to `{out}`")
    report.table(
        "",
        (
            ("experts", f"{len(plan.stacks)} layers × {plan.stacks[0].geometry.experts}"),
            ("serves", _serves(plan)),
            ("written", f"{report.size(run.bytes_written)} in {len(plan.jobs)} shards"),
            ("read", report.size(run.bytes_read)),
            ("resumed", f"{run.jobs_resumed} shards were already there"),
            ("time", f"{seconds:.1f} s, {report.size(rate)}/s"),
            ("peak memory", report.size(run.peak_rss_bytes)),
            *_extra(plan),
            ("next", f"moeconv verify {out} --read-data --source SRC"),
        ),
    )


def run_verify(
    root: Path, *, read_data: bool, source: Path | None, device: str, as_json: bool
) -> None:
    """Verify, and say what was found."""
    total = bytes_to_move(read_manifest(root), read_data=read_data, source=source is not None)
    result: Verified | None = None
    with report.progress() as bar:
        task = bar.add_task("verifying", total=total)
        for event in verify(root, pick(device), read_data=read_data, source=source):
            if isinstance(event, Verified):
                result = event
            else:
                bar.advance(task, event.nbytes)
    if result is None:
        message = "verification ended without a result"
        raise VerifyError(message)
    if as_json:
        report.emit({"event": "verified", "out": str(root), **asdict(result)})
        return
    report.good(f"`{root}` is as its manifest says")
    report.table(
        "",
        (
            ("files", f"{result.files} of the right size, {result.tensors} tensors in place"),
            ("digests", f"{result.digests} equal" if read_data else "not read (--read-data)"),
            (
                "source",
                f"{result.sources} tensors got back, byte for byte"
                if source
                else "not compared (--source SRC)",
            ),
        ),
    )


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
                f"{tensor.prefix}.{tensor.param}",
                str(tensor.spec),
                f"{tensor.experts.start}-{tensor.experts.stop - 1}",
                report.size(tensor.placement.end - tensor.placement.begin),
                report.size(tensor.read_bytes),
            )
            for tensor in view.tensors()
        ]
        title = f"TP rank {tp[1]} of {tp[0]}, EP rank {ep[1]} of {ep[0]}"
        report.grid(title, ("parameter", "final", "experts", "a range of", "reads"), rows)
