"""What does a converted model say of itself, and who loads it? By its manifest and config alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeconv.families import FAMILIES
from moeconv.inspection.inspected import (
    ConvertedSight,
    EngineSight,
    Inspection,
    common_sizes,
    engine_sight,
    groups_of,
)
from moeconv.layouts import find_layout
from moeconv.output.manifest import Manifest, StackEntry
from moeconv.planning.acceptance import answers, start_command
from moeconv.planning.fitting import TP_SIZES
from moeconv.planning.traits import Kind, model_of

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Json


@dataclass(frozen=True, slots=True)
class Place:
    """Where a converted model is, what it is called, and what is typed for an engine to load it."""

    where: str
    name: str
    loaded: str


def converted(place: Place, manifest: Manifest, config: Mapping[str, Json]) -> Inspection:
    """Return what a manifest, and the config beside it, say of a converted model."""
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
            tp_sizes=common_sizes(stack.tp_sizes for stack in stacks),
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
        yield engine_sight(answer, start_command(answer.engine, typed_name) if is_served else None)


def _entry_kind(stack: StackEntry) -> Kind:
    return Kind(stack.scheme, stack.experts, stack.hidden, stack.intermediate, stack.gated)
