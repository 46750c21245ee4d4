"""What does the manifest say of a plan and the shards it became?"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Final

from moeconv.jobs import Converted
from moeconv.modelconfig import model_types
from moeconv.output.manifest import (
    FORMAT,
    EngineEntry,
    FileEntry,
    LayoutEntry,
    Manifest,
    RunEntry,
    ShardRecord,
    SourceEntry,
    SourceFileEntry,
    TensorEntry,
    WeightEntry,
)
from moeconv.plan import Plan, facts_entries, stack_entries

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint

_TOOLS: Final = ("moeconv", "numpy", "torch", "safetensors", "flashinfer-python")


def describe(
    plan: Plan,
    checkpoint: Checkpoint,
    shards: Sequence[ShardRecord],
    side_files: Sequence[FileEntry],
    run: RunEntry,
) -> Manifest:
    """Return the manifest of a finished conversion; `shards` in the order of the plan's jobs."""
    tensors, weights = _entries(plan, shards)
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
            name=checkpoint.name,
            revision=None,
            model_types=tuple(model_types(checkpoint.config)),
            family=plan.family.name,
            files=tuple(
                SourceFileEntry(file.name, file.size, file.header_sha256, file.probe_xxh3)
                for file in checkpoint.files
            ),
        ),
        tools={name: _version(name) for name in _TOOLS},
        stacks=stack_entries(plan),
        facts=facts_entries(plan.facts or {}),
        left_out=dict(plan.left_out),
        tensors=tensors,
        weights=weights,
        files=(*(FileEntry(shard.file, shard.size, shard.sha256) for shard in shards), *side_files),
        sources=tuple(digest for shard in shards for digest in shard.sources),
        run=run,
    )


def _entries(
    plan: Plan, shards: Sequence[ShardRecord]
) -> tuple[tuple[TensorEntry, ...], tuple[WeightEntry, ...]]:
    tensors, weights = [], []
    for job, shard in zip(plan.jobs, shards, strict=True):
        by_name = {tensor.name: tensor for tensor in job.tensors}
        for record in shard.tensors:
            tensor = by_name[record.name]
            spec = tensor.spec
            if isinstance(tensor, Converted):
                entry = TensorEntry(
                    name=record.name,
                    prefix=tensor.stack.prefix,
                    param=tensor.output.param,
                    dtype=spec.dtype,
                    shape=spec.shape,
                    file=shard.file,
                    begin=record.begin,
                    end=record.end,
                    first=tensor.experts[0],
                    last=tensor.experts[-1],
                    rank=tensor.rank,
                    xxh3=record.xxh3,
                )
                tensors.append(entry)
            else:
                weights.append(
                    WeightEntry(
                        record.name,
                        spec.dtype,
                        spec.shape,
                        shard.file,
                        record.begin,
                        record.end,
                        record.xxh3[0],
                    )
                )
    return tuple(tensors), tuple(weights)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
