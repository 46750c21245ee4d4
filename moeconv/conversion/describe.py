"""What does the manifest say of a plan, before its shards are written?"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Final

from moeconv.conversion.provenance import source_entry
from moeconv.output.completing import together
from moeconv.output.manifest import (
    FORMAT,
    EngineEntry,
    FileEntry,
    KeptEntry,
    LayoutEntry,
    Manifest,
    SidecarEntry,
    SourceEntry,
    TensorEntry,
    WeightEntry,
)
from moeconv.planning.jobs import Converted
from moeconv.planning.modelconfig import model_types
from moeconv.planning.plan import Plan, facts_entries, stack_entries
from moeconv.planning.sidecar import is_sidecar, sidecar_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moeconv.checkpoint.types import Checkpoint
    from moeconv.output.shard import ShardLayout
    from moeconv.planning.jobs import Job

_TOOLS: Final = ("moeconv", "numpy", "torch", "safetensors", "flashinfer-python")


def draft(plan: Plan, checkpoint: Checkpoint) -> Manifest:
    """Return the manifest of a conversion before it has run: all but digests, and how it went."""
    arranged = [(job, job.arranged(plan.id)) for job in plan.jobs]
    tensors, weights, kept = _entries(arranged)
    target = plan.target
    return Manifest(
        format=FORMAT,
        plan_id=plan.id,
        plan=dict(plan.identity),
        partial=None if target.layers is None else "layers {}-{}".format(*target.layers),
        dtype=target.layout.dtype,
        layout=LayoutEntry(
            id=target.layout.id,
            version=target.layout.version,
            order="stored" if target.tp is None else "engine",
            tp=target.tp,
            engines=tuple(
                EngineEntry(engine.name, engine.versions, engine.backend)
                for engine in target.layout.engines
            ),
            fingerprint=dict(target.fingerprint),
        ),
        source=SourceEntry(
            name=checkpoint.origin.repo or checkpoint.name,
            revision=checkpoint.origin.commit,
            model_types=tuple(model_types(checkpoint.config)),
            family=plan.family.name,
            files=tuple(source_entry(file) for file in checkpoint.files),
        ),
        tools={name: _version(name) for name in _TOOLS},
        stacks=stack_entries(plan),
        facts=facts_entries(plan.facts or {}),
        left_out=dict(plan.left_out),
        restore=SidecarEntry(sidecar_bytes(plan), kept) if target.has_sidecar else None,
        tensors=tensors,
        weights=weights,
        files=tuple(FileEntry(job.file, layout.size, "") for job, layout in arranged),
        sources=(),
        run=together(()),
    )


def _entries(
    arranged: Iterable[tuple[Job, ShardLayout]],
) -> tuple[tuple[TensorEntry, ...], tuple[WeightEntry, ...], tuple[KeptEntry, ...]]:
    """Return converted tensors, those that pass through, and what the sidecar keeps."""
    tensors, weights, kept = [], [], []
    for job, layout in arranged:
        by_name = {tensor.name: tensor for tensor in job.tensors}
        for place in layout.entries:
            tensor, spec = by_name[place.name], place.spec
            held = (spec.dtype, spec.shape, job.file, place.begin, place.end)
            if isinstance(tensor, Converted):
                first, last = tensor.experts[0], tensor.experts[-1]
                prefix, param = tensor.stack.prefix, tensor.output.param
                entry = TensorEntry(place.name, prefix, param, *held, first, last, tensor.rank, ())
                tensors.append(entry)
                continue
            if is_sidecar(job.file):
                ref = tensor.ref
                kept.append(KeptEntry(place.name, *held, "", ref.file, ref.begin))
            else:
                weights.append(WeightEntry(place.name, *held, ""))
    return tuple(tensors), tuple(weights), tuple(kept)


@cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
