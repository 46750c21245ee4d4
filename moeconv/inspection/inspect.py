"""What is this directory, and what can become of it? Headers, config and manifest only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeconv.checkpoint.index import config_of, read_config
from moeconv.errors import MoeconvError, SourceError, UnsupportedError
from moeconv.inspection.converted import Place, converted
from moeconv.inspection.inspected import (
    CheckpointSight,
    Finding,
    Inspection,
    LayoutSight,
    common_sizes,
    engine_sight,
    groups_of,
)
from moeconv.layouts import LAYOUTS
from moeconv.output.codec import MOST_BYTES, parse_manifest, read_manifest
from moeconv.output.names import MANIFEST_NAME
from moeconv.paths import is_there
from moeconv.planning.acceptance import Answer, answers, make_command
from moeconv.planning.experts import look_for_experts
from moeconv.planning.fitting import fit, made_tp, served_tp
from moeconv.planning.modelconfig import activation, is_clamped, model_types, renormalises, scoring
from moeconv.planning.recognition import pick_family, reading_families
from moeconv.planning.stacks import Experts, Stack
from moeconv.planning.target import Wish, choose_layout
from moeconv.planning.traits import Model, kind_of, kinds_of, model_of
from moeconv.shell import typed
from moeconv.sourcing import find_source, open_found

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.families.family import Family
    from moeconv.layouts.layout import Layout
    from moeconv.planning.acceptance import Word

_BEST: Final[tuple[Word, ...]] = ("yes", "yes, but", "no")


def inspect_source(source: str, family_name: str | None = None) -> Inspection:
    """Look at a checkpoint or a converted directory; what is wrong with it is in the result."""
    try:
        root = Path(source)
        if is_there(root / MANIFEST_NAME):
            manifest, config = read_manifest(root), read_config(root)
            return converted(Place(source, root.resolve().name, typed(source)), manifest, config)
        found = find_source(source)
        if found.is_converted:
            origin = found.origin
            manifest = parse_manifest(origin.read(MANIFEST_NAME, MOST_BYTES))
            place = Place(origin.where, origin.name, f"{origin.repo} --revision {origin.commit}")
            return converted(place, manifest, config_of(origin))
        return _checkpoint(open_found(found), family_name)
    except MoeconvError as problem:
        return Inspection(
            event="inspection",
            root=source,
            name=Path(source).resolve().name,
            checkpoint=None,
            converted=None,
            groups=(),
            findings=findings((problem,)),
            warnings=(),
        )


def findings(problems: Iterable[MoeconvError]) -> tuple[Finding, ...]:
    """Return what was found, and those that differ in numbers alone as one."""
    alike: dict[str, list[MoeconvError]] = {}
    for problem in problems:
        alike.setdefault(re.sub(r"\d+", "0", str(problem)), []).append(problem)
    return tuple(
        Finding(same[0].exit_code, str(same[0]), same[0].hint, len(same) - 1)
        for same in alike.values()
    )


def _checkpoint(checkpoint: Checkpoint, family_name: str | None) -> Inspection:
    found = _found(checkpoint, family_name)
    family, stacks, config = found.family, found.experts.stacks, checkpoint.config
    model = None
    if family and stacks:
        model = model_of(family, config, kinds_of(stacks), checkpoint.tensors)
    said = _said(checkpoint, found)
    layouts = tuple(_layout(layout, stacks, checkpoint, model) for layout in LAYOUTS * bool(stacks))
    sizes = {stack.prefix: _expert_bytes(stack, checkpoint) for stack in stacks}
    total = sum(ref.spec.nbytes for ref in checkpoint.tensors.values())
    return Inspection(
        event="inspection",
        root=checkpoint.origin.where,
        name=checkpoint.name,
        checkpoint=CheckpointSight(
            model_types=tuple(model_types(config)),
            family=family.name if family else None,
            alike=tuple(one.name for one in found.alike),
            files=len(checkpoint.files),
            tensors=len(checkpoint.tensors),
            expert_bytes=sum(sizes.values()),
            other_bytes=total - sum(sizes.values()),
            other_experts=len(found.experts.extra),
            activation=activation(family, config) if family else None,
            clamped=is_clamped(family, config) if family else False,
            scoring=scoring(family, config) if family else None,
            renormalises=renormalises(family, config) if family else None,
            routing=model.routing if model else None,
            layouts=tuple(
                replace(it, command=f"moeconv {it.command} {said}" if said and it.command else None)
                for it in layouts
            ),
        ),
        converted=None,
        groups=groups_of(
            (stack.layer, (kind_of(stack), stack.geometry.order), sizes[stack.prefix])
            for stack in stacks
        ),
        findings=findings(found.problems),
        warnings=checkpoint.warnings,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """The family, the sound experts, families that would read them too, and what is wrong."""

    family: Family | None
    experts: Experts
    alike: tuple[Family, ...]
    problems: tuple[MoeconvError, ...]


def _found(checkpoint: Checkpoint, family_name: str | None) -> _Found:
    """Find the experts; where the config names no family, by those that agree on them."""
    family = None
    try:
        family = pick_family(checkpoint, family_name)
        experts, problems = look_for_experts(checkpoint, family)
    except (SourceError, UnsupportedError) as problem:
        readings, _ = reading_families(checkpoint)
        if family is None and family_name is None and readings.agree:
            alike = tuple(readings.experts)
            return _Found(None, readings.experts[alike[0]], alike, (problem,))
        return _Found(family, Experts((), frozenset()), (), (problem,))
    return _Found(family, experts, (), problems)


def _said(checkpoint: Checkpoint, found: _Found) -> str:
    """Return what follows a conversion's command; empty where it would be refused."""
    if found.problems and not found.alike:
        return ""
    said = typed(checkpoint.origin.where)
    if found.family:
        is_named = set(model_types(checkpoint.config)) & set(found.family.model_types)
        return said if is_named else f"{said} --family {found.family.name}"
    return f"{said} --family {found.alike[0].name if len(found.alike) == 1 else 'NAME'}"


def _layout(
    layout: Layout, stacks: tuple[Stack, ...], checkpoint: Checkpoint, model: Model | None
) -> LayoutSight:
    """Say what a layout can do for these experts, as the command that makes it would find."""
    engine = layout.engines[0].name
    reasons: tuple[str, ...] = ()
    left = 0
    taken: tuple[Stack, ...] = ()
    schemes = {stack.scheme.name for stack in stacks}
    if schemes & set(layout.schemes):
        try:
            chosen = choose_layout(Wish(layout.command, engine=engine), stacks, checkpoint.config)
        except UnsupportedError as problem:
            reasons = (str(problem),)
        else:
            held = fit(stacks, chosen, None)
            taken, left = held.taken, len(held.left)
            reasons = tuple(finding.message for finding in findings(held.problems))
            if chosen.id != layout.id:
                reasons = (f"{engine} reads this checkpoint's experts as {chosen.id}",)
    else:
        stored, wanted = " and ".join(sorted(schemes)), " or ".join(layout.schemes)
        reasons = (f"the experts are {stored}, and it takes {wanted}",)
    if reasons:
        return LayoutSight(layout.id, "no", reasons, left, (), (), None, ())
    said = answers(layout, model) if model else _unknown(layout)
    served = common_sizes(served_tp(layout, stack.geometry) for stack in taken)
    made = common_sizes(made_tp(layout, stack.geometry) for stack in taken)
    word = min((answer.word for answer in said), key=_BEST.index)
    return LayoutSight(
        layout=layout.id,
        answer=word,
        reasons=(),
        left=left,
        tp_sizes=served,
        own_tp_sizes=tuple(size for size in made if size not in served),
        command=None if word == "no" else make_command(layout),
        engines=tuple(engine_sight(answer) for answer in said),
    )


def _unknown(layout: Layout) -> tuple[Answer, ...]:
    reason = "the activation and the routing of this model are not known"
    return tuple(Answer(engine, "yes, but", (reason,), ()) for engine in layout.engines)


def _expert_bytes(stack: Stack, checkpoint: Checkpoint) -> int:
    return sum(checkpoint.tensors[name].spec.nbytes for name in stack.names)
