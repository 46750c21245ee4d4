"""What would a conversion do, and what stands against it? All of it at once; nothing is written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moeconv import report
from moeconv.checkpoint.blank import BlankRanges
from moeconv.checkpoint.reader import Reader, reader_for
from moeconv.commands.options import Options
from moeconv.commands.space import check_bound, check_space
from moeconv.commands.summary import Prospect, show_plan
from moeconv.commands.travel import Travel
from moeconv.conversion.budget import budget_for
from moeconv.conversion.estimate import estimate
from moeconv.conversion.survey import check_share, survey, surveyed_bytes, total
from moeconv.errors import MoeconvError
from moeconv.inspection.inspect import findings
from moeconv.kernels import pick
from moeconv.layouts.fingerprint import fingerprint
from moeconv.output.notes import Notes
from moeconv.output.ownership import check_output, is_finished, replaces
from moeconv.output.place import check_apart, existing
from moeconv.planning.acceptance import check_engines
from moeconv.planning.experts import look_for_experts
from moeconv.planning.fitting import fit
from moeconv.planning.plan import Plan, Target, plan_for
from moeconv.planning.recognition import pick_family
from moeconv.planning.target import Wish, choose_layout, out_name
from moeconv.planning.traits import kinds_of, model_of
from moeconv.sourcing import is_local, open_source, pinned

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.layouts.layout import Layout
    from moeconv.layouts.verbs import Kernels
    from moeconv.publishing.outlook import Outlook


def preview(options: Options, wish: Wish) -> None:
    """Show the plan, or all that a conversion would refuse, with its exit code."""
    # Torch is slow to import and the bytes are the same, so `auto` is the CPU here.
    kernels = pick("cpu" if options.device == "auto" else options.device)
    checkpoint = open_source(options.source)
    for note in checkpoint.notes:
        report.note(note)
    family = pick_family(checkpoint, options.family)
    experts, found = look_for_experts(checkpoint, family)
    problems = list(found)
    layout = None
    if experts.stacks:
        with _noting(problems):
            layout = choose_layout(wish, experts.stacks, checkpoint.config)
    if layout:
        problems += fit(experts.stacks, layout, options.tp).problems
        with _noting(problems):
            kinds = kinds_of(experts.stacks)
            model = model_of(family, checkpoint.config, kinds, checkpoint.tensors)
            _warn(*checkpoint.warnings, *check_engines(layout, model))
    if layout and not problems:
        with _noting(problems):
            target = target_of(options, wish, layout, kernels)
            out = options.out or Path(out_name(checkpoint.name, layout, options.tp))
            if began := began_with(checkpoint, out, options):
                preview(began, wish)
                return
            plan = plan_for(checkpoint, family, experts, target)
            _warn(*plan.warnings[len(checkpoint.warnings) :])
            problems += _obstacles(plan, out, options, kernels)
            outlook = None
            with _noting(problems):
                outlook = _look(options, plan)
            is_remote = checkpoint.origin.is_remote
            if not (is_remote and surveyed_bytes(plan)):  # headers are all that comes from afar
                plan = surveyed(plan, checkpoint, options.max_lost_share)
            if not problems:
                with Reader(BlankRanges()) if is_remote else reader_for(checkpoint) as reader:
                    cost = estimate(plan, reader, kernels, options.limits, existing(out))
                travel = Travel.of(plan, checkpoint, is_kept=options.keep_source, outlook=outlook)
                is_done = not options.overwrite and is_finished(out, plan.id)
                most = options.max_disk_bytes
                prospect = Prospect(out, cost, most, outlook, travel, is_done)
                show_plan(plan, checkpoint, prospect, as_json=options.as_json)
    if problems:
        _refuse(problems, as_json=options.as_json)


def began_with(checkpoint: Checkpoint, out: Path, options: Options) -> Options | None:
    """Return the options with which a run goes on whose branch has moved since it began."""
    began = Notes.asked_of(out)
    source = None if options.overwrite else pinned(checkpoint, began)
    if source is None:
        return None
    report.note(
        f"`{options.source}` has moved since `{out}` was begun, which goes on with `{source}`"
    )
    return replace(options, source=source)


def target_of(options: Options, wish: Wish, layout: Layout, kernels: Kernels) -> Target:
    """Return all that decides the bytes, by what the person asked for."""
    return Target(
        layout,
        fingerprint(layout, kernels),
        options.tp,
        options.max_shard_bytes,
        None if options.layers is None else (options.layers[0], options.layers[-1]),
        wish.reconciles,
        options.sidecar,
    )


def surveyed(plan: Plan, checkpoint: Checkpoint, max_lost_share: float) -> Plan:
    """Survey the scales, where the layout asks for it; warn of what it will not keep.

    Raises
    ------
    UnsupportedError
        A layer would lose more of its scales than the share that may be lost.
    """
    if plan.facts is None:
        with report.progress() as bar, reader_for(checkpoint) as reader:
            nbytes = surveyed_bytes(plan)
            task = bar.add_task("surveying scales", total=nbytes, visible=nbytes > 0)
            for event in survey(plan, checkpoint, reader):
                if isinstance(event, Plan):
                    plan = event
                else:
                    bar.advance(task, event.nbytes)
    known = plan.facts or {}
    check_share(known, max_lost_share)
    totals = total(known)
    if totals.differing and not totals.reconciled:
        report.warn(
            f"{totals.differing} experts have different global scales for gate and up; gate's is "
            "used for both, as the engine does (`--reconcile-scales` folds the larger one in)"
        )
    if totals.unsound:
        report.warn(
            f"{totals.unsound} global scales are NaN, infinite, zero or negative; they become what "
            "the engine makes of them: is the checkpoint sound?"
        )
    return plan


def _warn(*warnings: str) -> None:
    for warning in warnings:
        report.warn(warning)


def _obstacles(plan: Plan, out: Path, options: Options, kernels: Kernels) -> list[MoeconvError]:
    """Return what this machine has against a plan: memory, the output directory, disk space."""
    problems: list[MoeconvError] = []
    overwrite = replaces(out, plan.id, overwrite=options.overwrite)
    with _noting(problems):
        budget_for(plan.jobs, options.limits, kernels)
    with _noting(problems):
        if is_local(options.source):
            check_apart(out, Path(options.source))
        check_output(out, plan.id, plan.identity, overwrite=overwrite)
    with _noting(problems):
        check_bound(plan, options.max_disk_bytes, is_pushed=options.push is not None)
    with _noting(problems):
        jobs, most = options.own_jobs(plan), options.max_disk_bytes
        check_space(out, jobs, overwrite=overwrite, most_bytes=most)
    return problems


def _look(options: Options, plan: Plan) -> Outlook | None:
    """Return what is on the Hub where the result is to go, if it is to go there."""
    if options.destination is None:
        return None
    from moeconv.output.hub import Repository
    from moeconv.publishing.outlook import look

    repository = Repository(options.destination, plan.id)
    return look(repository, is_there=repository.check())


def _refuse(problems: list[MoeconvError], *, as_json: bool) -> NoReturn:
    found = findings(problems)
    if as_json:
        report.emit({"event": "refused", "findings": [asdict(finding) for finding in found]})
    for finding in found:
        report.finding(finding.message, finding.hint, finding.more)
    sys.exit(found[0].code)


@contextmanager
def _noting(problems: list[MoeconvError]) -> Iterator[None]:
    """Note what is refused, and go on behind the block."""
    try:
        yield
    except MoeconvError as problem:
        problems.append(problem)
