"""What is this directory, and what can become of it? Headers, config and manifest only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeconv.checkpoint.index import config_of, read_config
from moeconv.errors import MoeconvError, SourceError, UnsupportedError
from moeconv.families import FAMILIES
from moeconv.inspection.inspected import (
    CheckpointSight,
    ConvertedSight,
    EngineSight,
    Finding,
    Inspection,
    LayoutSight,
    groups_of,
)
from moeconv.layouts import LAYOUTS, find_layout
from moeconv.output.codec import MOST_BYTES, parse_manifest, read_manifest
from moeconv.output.manifest import Manifest, StackEntry
from moeconv.output.names import MANIFEST_NAME
from moeconv.paths import is_there
from moeconv.planning.acceptance import Answer, answers, make_command, start_command
from moeconv.planning.experts import look_for_experts
from moeconv.planning.fitting import TP_SIZES, fit, made_tp, served_tp
from moeconv.planning.modelconfig import activation, is_clamped, model_types, renormalises, scoring
from moeconv.planning.recognition import pick_family, reading_families
from moeconv.planning.stacks import Experts, Stack
from moeconv.planning.target import Wish, choose_layout
from moeconv.planning.traits import Kind, Model, kind_of, kinds_of, model_of
from moeconv.shell import typed
from moeconv.sourcing import find_source, open_found

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint, Json
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
            return _converted(_Place(source, root.resolve().name, typed(source)), manifest, config)
        found = find_source(source)
        if found.is_converted:
            origin = found.origin
            manifest = parse_manifest(origin.read(MANIFEST_NAME, MOST_BYTES))
            place = _Place(origin.where, origin.name, f"{origin.repo} --revision {origin.commit}")
            return _converted(place, manifest, config_of(origin))
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
    served = _common(served_tp(layout, stack.geometry) for stack in taken)
    made = _common(made_tp(layout, stack.geometry) for stack in taken)
    word = min((answer.word for answer in said), key=_BEST.index)
    return LayoutSight(
        layout=layout.id,
        answer=word,
        reasons=(),
        left=left,
        tp_sizes=served,
        own_tp_sizes=tuple(size for size in made if size not in served),
        command=None if word == "no" else make_command(layout),
        engines=tuple(_engine(answer) for answer in said),
    )


def _unknown(layout: Layout) -> tuple[Answer, ...]:
    reason = "the activation and the routing of this model are not known"
    return tuple(Answer(engine, "yes, but", (reason,), ()) for engine in layout.engines)


def _engine(answer: Answer, start: str | None = None) -> EngineSight:
    engine = answer.engine
    return EngineSight(
        engine=engine.name,
        versions=engine.versions,
        flags=engine.backend,
        answer=answer.word,
        reasons=answer.reasons,
        needs=answer.needs,
        start=start,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a converted model is, what it is called, and what is typed for an engine to load it."""

    where: str
    name: str
    loaded: str


def _converted(place: _Place, manifest: Manifest, config: Mapping[str, Json]) -> Inspection:
    stacks = manifest.stacks
    sizes: dict[str, int] = {}
    for tensor in manifest.tensors:
        sizes[tensor.prefix] = sizes.get(tensor.prefix, 0) + tensor.end - tensor.begin
    experts = {stack.experts for stack in stacks}
    return Inspection(
        event="inspection",
        root=place.where,
        name=place.name,
        checkpoint=None,
        converted=ConvertedSight(
            layout=manifest.layout.id,
            version=manifest.layout.version,
            dtype=manifest.dtype,
            tp=manifest.layout.tp,
            partial=manifest.partial,
            source=manifest.source.name,
            family=manifest.source.family,
            expert_bytes=sum(sizes.values()),
            other_bytes=sum(weight.end - weight.begin for weight in manifest.weights),
            restore_bytes=manifest.restore.nbytes if manifest.restore else None,
            files=len(manifest.files),
            tp_sizes=_common(stack.tp_sizes for stack in stacks),
            ep_sizes=tuple(
                size for size in TP_SIZES if all(count % size == 0 for count in experts)
            ),
            scales=sum(facts.scales for facts in manifest.facts),
            flushed=sum(facts.flushed for facts in manifest.facts),
            negative=sum(facts.negative for facts in manifest.facts),
            # Each rank of a file for one TP size has the same.
            unsound=sum({it.prefix: it.unsound for it in manifest.facts}.values()),
            left_out=manifest.left_out,
            digests=dict(
                Counter(file.sha256_from for file in manifest.source.files if file.sha256_from)
            ),
            tools=manifest.tools,
            engines=tuple(loaders(place.loaded, manifest, config)),
        ),
        groups=groups_of(
            (stack.layer, (_entry_kind(stack), stack.order), sizes.get(stack.prefix, 0))
            for stack in stacks
        ),
        findings=(),
        warnings=(f"it holds only {manifest.partial} of the model, for a trial",)
        if manifest.partial
        else (),
    )


def loaders(
    typed_name: str, manifest: Manifest, config: Mapping[str, Json]
) -> Iterator[EngineSight]:
    """Yield who loads a converted directory, or repository, and how it is started."""
    family = next((it for it in FAMILIES if it.name == manifest.source.family), None)
    layout = find_layout(manifest.layout.id)
    if family is None or layout is None:
        return
    kinds = dict.fromkeys(_entry_kind(stack) for stack in manifest.stacks)
    model = model_of(family, config, kinds, (weight.name for weight in manifest.weights))
    for answer in answers(layout, model):
        is_served = answer.word != "no" and not manifest.partial
        yield _engine(answer, start_command(answer.engine, typed_name) if is_served else None)


def _entry_kind(stack: StackEntry) -> Kind:
    return Kind(stack.scheme, stack.experts, stack.hidden, stack.intermediate, stack.gated)


def _expert_bytes(stack: Stack, checkpoint: Checkpoint) -> int:
    return sum(checkpoint.tensors[name].spec.nbytes for name in stack.names)


def _common(sizes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sizes that all have."""
    every = list(map(set, sizes))
    return tuple(sorted(set[int].intersection(*every))) if every else ()
