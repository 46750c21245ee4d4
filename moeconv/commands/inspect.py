"""What does `inspect` show? Nothing here reads a byte of a tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from moeconv import report
from moeconv.inspection.inspect import inspect_source
from moeconv.shell import typed

if TYPE_CHECKING:
    from moeconv.inspection.inspected import (
        CheckpointSight,
        ConvertedSight,
        EngineSight,
        Group,
        Inspection,
        LayoutSight,
    )


def run_inspect(source: str, *, family: str | None, as_json: bool) -> None:
    """Say what a directory is; the exit code says whether something can be made of it."""
    found = inspect_source(source, family)
    if as_json:
        report.emit(asdict(found))
    else:
        _show_inspection(found)
    sys.exit(found.exit_code)


def _show_inspection(found: Inspection) -> None:
    if found.checkpoint or found.converted:
        _show_what_it_is(found)
    for finding in found.findings:
        report.finding(finding.message, finding.hint, finding.more, to_stdout=True)
    if found.checkpoint:
        _show_layouts(found.checkpoint.layouts)
    if found.converted:
        for engine in found.converted.engines:
            _show_loader(engine)
        report.text("")
        check = [("check it", f"moeconv verify {typed(found.root)} --read-data")]
        report.table("", (), commands=check, to_stdout=True)


def _show_what_it_is(found: Inspection) -> None:
    rows = [("where", found.root)]
    if found.checkpoint:
        rows += _checkpoint_rows(found.checkpoint, found.groups)
    if found.converted:
        rows += _converted_rows(found.converted, found.groups)
    report.table(found.name, rows, to_stdout=True)
    for warning in found.warnings:
        report.warn(warning)
    if found.findings:
        report.heading("what stands against a conversion")


def _checkpoint_rows(sight: CheckpointSight, groups: Iterable[Group]) -> Iterator[tuple[str, str]]:
    types = " / ".join(sight.model_types) or "no model_type"
    family = f"family {sight.family}" if sight.family else "of no known family"
    yield "model", f"{types}, {family}"
    if sight.alike:
        yield "read as by", ", ".join(sight.alike)
    yield from _group_rows(groups)
    parts = ((sight.expert_bytes, "of experts"), (sight.other_bytes, "of the rest"))
    known = parts if sight.expert_bytes else ((sight.other_bytes, "in all"),)
    yield "bytes", ", ".join(f"{report.size(nbytes)} {what}" for nbytes, what in known)
    yield "files", f"{sight.files}, which hold {report.count(sight.tensors, 'tensor')}"
    if sight.other_experts:
        yield (
            "as they are",
            f"{report.count(sight.other_experts, 'expert tensor')} outside the main model",
        )
    if sight.activation:
        yield "activation", sight.activation + (", gate and up clamped" if sight.clamped else "")
    if sight.scoring:
        weights = {
            True: "weights made to sum to 1",
            False: "weights as they are",
            None: "whether weights are made to sum to 1 is not said",
        }[sight.renormalises]
        name = f" (vLLM: {sight.routing})" if sight.routing else ""
        yield "routing", f"{sight.scoring}, {weights}{name}"


def _group_rows(groups: Iterable[Group]) -> Iterator[tuple[str, str]]:
    for group in groups:
        gated = "gate, up, down" if group.gated else "up, down, no gate"
        order = ", gate and up in pairs" if group.order == "pairs" else ""
        yield (
            "experts",
            (
                f"{report.count(group.count, 'layer')} ({group.layers}) × {group.experts}, "
                f"{group.scheme}, hidden {group.hidden}, intermediate {group.intermediate}, "
                f"{gated}{order}"
            ),
        )


def _converted_rows(sight: ConvertedSight, groups: Iterable[Group]) -> Iterator[tuple[str, str]]:
    size = report.size
    yield "converted", f"{sight.layout} version {sight.version}, for {sight.dtype}"
    yield "from", f"{sight.source}, family {sight.family}"
    yield from _group_rows(groups)
    yield (
        "bytes",
        (
            f"{size(sight.expert_bytes)} of experts, {size(sight.other_bytes)} as in the source; "
            f"{report.count(sight.files, 'file')}"
        ),
    )
    tp = _numbers(sight.tp_sizes)
    yield "serves", f"TP {tp} only" if sight.tp else f"TP {tp}; EP {_numbers(sight.ep_sizes)}"
    if sight.partial:
        yield "partial", f"only {sight.partial}: engines refuse it"
    if sight.scales:
        yield (
            "scales",
            f"{sight.scales}: {sight.flushed} flushed to zero, {sight.negative} negative or NaN",
        )
    if sight.unsound:
        yield "global scales", f"{sight.unsound} are NaN, infinite, zero or negative"
    for part, count in sight.left_out.items():
        yield "left out", f"{report.count(count, f'{part} tensor')}, which the kernel does not read"
    can = "cannot be restored"
    if sight.restore_bytes is not None:
        can = f"can be restored, with {size(sight.restore_bytes)} more in restore/"
    yield "source", can
    known = [f"{report.count(count, 'file')}, {where}" for where, count in sight.digests.items()]
    yield "its SHA-256", "; ".join(known) or "not known (--hash-source)"
    yield "made by", ", ".join(f"{name} {version}" for name, version in sight.tools.items())


def _show_layouts(sights: Iterable[LayoutSight]) -> None:
    """Show each layout that could be meant, then those for experts of another kind."""
    others = []
    for sight in sights:
        if sight.answer == "no" and not sight.engines and len(sight.reasons) == 1:
            others.append((f"  {sight.layout}", sight.reasons[0]))
        else:
            _show_layout(sight)
    if others:
        report.heading("other layouts", "no")
        report.table("", others, to_stdout=True)


def _show_layout(sight: LayoutSight) -> None:
    because = f", because {sight.reasons[0]}" if sight.reasons else ""
    report.heading(sight.layout, sight.answer, because)
    rows = [("", reason) for reason in sight.reasons[1:]]
    for engine in sight.engines:
        rows += [(engine.engine, f"{engine.answer}: {reason}") for reason in engine.reasons]
        if not engine.reasons:
            rows.append((engine.engine, f"yes, {engine.versions}"))
        if engine.answer != "no" and engine.needs:
            rows.append(("", f"needs {engine.needs[0]}"))
            rows += [("", need) for need in engine.needs[1:]]
    if sight.left:
        rows.append(("as they are", f"{report.count(sight.left, 'layer')} of other experts"))
    if sight.command:
        rows.append(("serves", f"TP {_numbers(sight.tp_sizes)} with one file"))
        if sight.own_tp_sizes:
            rows.append(("", f"TP {_numbers(sight.own_tp_sizes)} with a file each (--tp)"))
    _show_indented(rows, sight.command)


def _show_loader(engine: EngineSight) -> None:
    report.heading(f"{engine.engine} {engine.versions}", engine.answer)
    rows = [("", reason) for reason in engine.reasons]
    if engine.start:
        rows += [("needs" if i == 0 else "", need) for i, need in enumerate(engine.needs)]
    _show_indented(rows, engine.start)


def _show_indented(rows: Iterable[tuple[str, str]], command: str | None) -> None:
    commands = [("  run", command)] if command else []
    shown = [(f"  {name}", value) for name, value in rows]
    report.table("", shown, commands=commands, to_stdout=True)


def _numbers(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"
