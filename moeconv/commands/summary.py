"""What a plan, and a finished conversion, look like to a person and to a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeconv import report
from moeconv.commands.travel import Travel, network_rows, push_facts, push_rows
from moeconv.conversion.survey import total
from moeconv.output.place import free_bytes
from moeconv.planning.fitting import served_tp
from moeconv.planning.jobs import Converted
from moeconv.planning.plan import Plan
from moeconv.planning.sidecar import sidecar_bytes
from moeconv.shell import typed

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.conversion.estimate import Estimate
    from moeconv.output.manifest import Manifest
    from moeconv.publishing.outlook import Outlook

_NATIVE_FP4: Final = (
    "Blackwell GPUs have native FP4 kernels; there Marlin, which computes in 16 bits, is a fallback"
)


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a conversion would cost, and where its result would go.

    Attributes
    ----------
    out
        The output directory.
    cost
        Time and memory.
    max_disk_bytes
        The bound on all shards that are there at a time; `None` where they stay.
    outlook
        What is on the Hub, where it goes there.
    travel
        What comes and goes over the network.
    is_done
        It has been converted to there: nothing would be written, at most sent.
    """

    out: Path
    cost: Estimate
    max_disk_bytes: int | None
    outlook: Outlook | None
    travel: Travel
    is_done: bool


def show_plan(plan: Plan, checkpoint: Checkpoint, prospect: Prospect, *, as_json: bool) -> None:
    """Show what a conversion would do, and what it would cost."""
    if as_json:
        report.emit({"event": "plan", **_facts(plan, checkpoint, prospect)})
        return
    out, cost, outlook = prospect.out, prospect.cost, prospect.outlook
    expert_bytes, free = _expert_bytes(plan), free_bytes(out)
    geometry = plan.stacks[0].geometry
    report.table(
        f"plan for {checkpoint.name}",
        (
            ("family", plan.family.name),
            ("layout", f"{plan.target.layout.id} for {plan.target.layout.dtype} → {out}"),
            ("experts", f"{report.count(len(plan.stacks), 'layer')} × {geometry.experts}"),
            ("sizes", f"hidden {geometry.hidden}, intermediate {geometry.intermediate}"),
            ("serves", _serves(plan)),
            ("shards", f"{len(plan.jobs)}, {report.size(plan.nbytes)}"),
            ("in experts", report.size(expert_bytes)),
            ("passes through", report.size(plan.nbytes - expert_bytes - sidecar_bytes(plan))),
            ("for restore", _sidecar(plan)),
            *_extra(plan),
            ("buffers", report.size(cost.buffer_bytes)),
            ("peak memory", f"{report.size(cost.host_bytes)}, an estimate"),
            *_device(cost),
            *network_rows(prospect.travel),
            (
                "free disk",
                f"{report.size(free)}; {_disk(plan, prospect.max_disk_bytes)}",
            ),
            ("time", _time(cost, is_remote=checkpoint.origin.is_remote)),
            *(push_rows(outlook, plan.id) if outlook else ()),
        ),
        to_stdout=True,
    )
    if prospect.is_done and outlook is None:
        report.good(f"`{out}` is already converted with these options; nothing would be written")
        return
    report.note("nothing was written; without `--dry-run` the same command converts")


def _facts(plan: Plan, checkpoint: Checkpoint, prospect: Prospect) -> dict[str, object]:
    cost, outlook = prospect.cost, prospect.outlook
    expert_bytes = _expert_bytes(plan)
    return {
        "source": checkpoint.origin.where,
        "out": str(prospect.out),
        "is_done": prospect.is_done,
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
        "other_bytes": plan.nbytes - expert_bytes - sidecar_bytes(plan),
        "sidecar_bytes": sidecar_bytes(plan),
        "other_experts": plan.extra_experts,
        "left_layers": len(plan.left_stacks),
        "left_out": dict(plan.left_out),
        "scales": asdict(total(plan.facts or {})),
        "facts": [
            {"prefix": prefix, "rank": rank, **asdict(replace(fact, ratios=(), lossy=()))}
            for (prefix, rank), fact in (plan.facts or {}).items()
        ],
        "dtype": plan.target.layout.dtype,
        "buffer_bytes": cost.buffer_bytes,
        "host_bytes": cost.host_bytes,
        "device_bytes": cost.device_bytes,
        "network_bytes": prospect.travel.down,
        "free_bytes": free_bytes(prospect.out),
        "disk_bytes": min(plan.nbytes, prospect.max_disk_bytes or plan.nbytes),
        "push": outlook and push_facts(outlook, plan.id),
        "seconds": cost.seconds,
        "bytes_per_s": round(cost.bytes_per_s),
        "warnings": list(plan.warnings),
    }


def _expert_bytes(plan: Plan) -> int:
    return sum(
        tensor.spec.nbytes
        for job in plan.jobs
        for tensor in job.tensors
        if isinstance(tensor, Converted)
    )


def _disk(plan: Plan, max_disk_bytes: int | None) -> str:
    if max_disk_bytes is None or max_disk_bytes >= plan.nbytes:
        return f"{report.size(plan.nbytes)} are needed"
    size = report.size(max_disk_bytes)
    return f"at most {size} of {report.size(plan.nbytes)} are there at a time (--max-disk)"


def _device(cost: Estimate) -> Iterator[tuple[str, str]]:
    if cost.device_bytes:
        yield "GPU memory", f"at most {report.size(cost.device_bytes)}, an estimate"


def _peak(device_bytes: int) -> Iterator[tuple[str, str]]:
    if device_bytes:
        yield "on the GPU", report.size(device_bytes)


def _time(cost: Estimate, *, is_remote: bool) -> str:
    bare = ", without the network" if is_remote else ""
    return (
        f"about {report.duration(cost.seconds)} at {report.size(cost.bytes_per_s)}/s: an estimate, "
        f"from laying out {report.size(cost.sample_bytes)} of experts and trying the disk{bare}"
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


def _extra(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what is not converted, and what happens to scales."""
    if plan.extra_experts:
        yield (
            "as they are",
            f"{report.count(plan.extra_experts, 'expert tensor')} outside the main model",
        )
    if plan.left_stacks:
        schemes = ", ".join(sorted({stack.scheme.name for stack in plan.left_stacks}))
        yield "as they are", f"{report.count(len(plan.left_stacks), 'layer')} of {schemes} experts"
    for part, count in plan.left_out.items():
        where = "in restore/ only" if plan.target.has_sidecar else "not kept"
        yield (
            "left out",
            f"{report.count(count, f'{part} tensor')}, which the kernel does not read: {where}",
        )
    totals = total(plan.facts or {})
    if totals.scales:
        yield (
            "scales",
            f"{totals.scales}: {totals.flushed} flushed to zero, {totals.negative} negative or NaN",
        )
        how = "reconciled" if totals.reconciled else "gate's used for both"
        if totals.differing:
            yield "global scales", f"{totals.differing} experts differ between gate and up: {how}"
        factors = sorted(
            {factor for facts in (plan.facts or {}).values() for factor in facts.factors}
        )
        yield "factors", ", ".join(f"{factor:g}" for factor in factors)


def _sidecar(plan: Plan) -> str:
    if plan.target.has_sidecar and plan.facts is None:
        return "known when the scales have been read"
    if plan.target.has_sidecar:
        return f"{report.size(sidecar_bytes(plan))}, which no engine reads"
    return "nothing: the source cannot be restored"


def _written(plan: Plan, nbytes: int) -> str:
    """Say what this process wrote, and of how much: others may have done the rest."""
    whole, mine = report.size(plan.nbytes), report.size(nbytes)
    part = "" if mine == whole else f"{mine} of "
    return f"{part}{whole} in {report.count(len(plan.jobs), 'shard')}"


def _resumed(jobs: int) -> Iterator[tuple[str, str]]:
    if jobs:
        yield "resumed", f"{report.count(jobs, 'shard')} already there"


@dataclass(frozen=True, slots=True)
class Finished:
    """A conversion that ended well: from where, to where, in how long, and what was written.

    Attributes
    ----------
    source
        What to verify it against; `None` where it goes on to the Hub.
    starts
        The command of each engine that takes it.
    """

    source: str | None
    out: Path
    seconds: float
    manifest: Manifest
    starts: tuple[str, ...]


def show_result(plan: Plan, finished: Finished, *, as_json: bool) -> None:
    """Show what a conversion did."""
    run, out, seconds = finished.manifest.run, finished.out, finished.seconds
    rate = run.bytes_written / seconds if seconds else 0.0
    if as_json:
        told = {**asdict(run), "seconds": round(seconds, 3)}  # the survey included
        told["sidecar_bytes"] = sidecar_bytes(plan)
        report.emit({"event": "done", "out": str(out), "plan_id": plan.id, **told})
        return
    report.good(f"converted to `{out}`")
    report.table(
        "",
        (
            (
                "experts",
                f"{report.count(len(plan.stacks), 'layer')} × {plan.stacks[0].geometry.experts}",
            ),
            ("serves", _serves(plan)),
            ("written", _written(plan, run.bytes_written)),
            ("read", report.size(run.bytes_read)),
            *_resumed(run.jobs_resumed),
            ("time", f"{seconds:.1f} s, {report.size(rate)}/s"),
            ("laid out by", f"{run.kernels} on {run.device}"),
            ("peak memory", report.size(run.peak_rss_bytes)),
            *_peak(run.peak_device_bytes),
            ("for restore", _sidecar(plan)),
            *_extra(plan),
            *((("note", _NATIVE_FP4),) if "fp4" in plan.target.layout.id else ()),
        ),
        commands=tuple(_next(finished)),
    )


def _next(finished: Finished) -> Iterator[tuple[str, str]]:
    if finished.source is None:
        return
    out, source = typed(finished.out), typed(finished.source)
    yield "next", f"moeconv verify {out} --read-data --source {source}"
    if finished.manifest.partial:
        yield "then", "the same command without --layers, with --overwrite, to convert all of it"
        return
    for i, start in enumerate(finished.starts):
        yield "then" if i == 0 else "or", start
