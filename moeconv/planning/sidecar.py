"""What of a checkpoint do the other shards not give back?

Byte ranges of its files: what no tensor holds (their headers), what the layout has no use for, and
what it loses bits of; and the index. They are kept as tensors of bytes in shards of their own, so
that nothing that writes, resumes, verifies or uploads shards has to know of them. Ranges that touch
are one: writers put the small tensors of a file side by side, so they are few.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from moeconv.checkpoint.types import TensorRef
from moeconv.layouts.layout import Slice
from moeconv.layouts.verbs import is_lossless
from moeconv.planning.jobs import pass_on
from moeconv.planning.plan import Known, Plan
from moeconv.tensors import TensorSpec

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.planning.stacks import Stack

    Range: TypeAlias = tuple[int, int]

FOLDER: Final = "restore"


def settle(plan: Plan, checkpoint: Checkpoint, facts: Known) -> Plan:
    """Return a plan with what a survey found, and with the sidecar that follows from it."""
    plan = replace(plan, facts=facts)
    if not plan.target.has_sidecar:
        return plan
    most = plan.target.max_shard_bytes
    sidecar = pass_on(_kept(plan, checkpoint), f"{FOLDER}/{FOLDER}", most)
    return replace(plan, jobs=(*plan.jobs, *sidecar))


def is_sidecar(file: str) -> bool:
    """Say whether a shard is one of a sidecar."""
    return file.startswith(f"{FOLDER}/")


def sidecar_bytes(plan: Plan) -> int:
    """Return the bytes that a sidecar keeps; 0 where there is none."""
    return sum(job.nbytes for job in plan.jobs if is_sidecar(job.file))


def _kept(plan: Plan, checkpoint: Checkpoint) -> Iterator[TensorRef]:
    """Yield the bytes to keep, by file and offset, then every index."""
    held: dict[str, list[Range]] = defaultdict(list)
    lost: dict[str, list[Range]] = defaultdict(list)
    for ref in checkpoint.tensors.values():
        held[ref.file].append((ref.begin, ref.begin + ref.spec.nbytes))
    for stack in plan.stacks:
        for ref, (begin, end) in _lost(stack, plan):
            lost[ref.file].append((ref.begin + begin, ref.begin + end))
    for file in checkpoint.files:
        for begin, end in _merged([*_gaps(held[file.name], file.size), *lost[file.name]]):
            yield _bytes(file.name, begin, end)
    for name, size in checkpoint.indexes.items():
        yield _bytes(name, 0, size)


def _bytes(file: str, begin: int, end: int) -> TensorRef:
    return TensorRef(f"{file}:{begin}-{end}", TensorSpec("U8", (end - begin,)), file, begin)


def _lost(stack: Stack, plan: Plan) -> Iterator[tuple[TensorRef, Range]]:
    """Yield the bytes of a layer's experts that their converted form does not give back."""
    layout, whole = plan.target.layout, Slice(0, stack.geometry.intermediate)
    outputs = layout.outputs(stack.geometry, whole)
    known = {"weight_scale"} if layout.surveyed(stack.geometry, whole) else frozenset[str]()
    lossy = {output.matrix.part for output in outputs if not is_lossless(output.verb)} - known
    used = {output.matrix.part for output in outputs}
    for (_, part), source in stack.sources.items():
        if part not in used or part in lossy:
            for ref in source.refs:
                yield ref, (0, ref.spec.nbytes)
    for (prefix, _), facts in (plan.facts or {}).items():
        if prefix == stack.prefix:
            for projection, expert in facts.lossy:
                scales = stack.sources.get((projection, "weight_scale"))
                if scales is not None:  # where the facts are a manifest's, which may say anything
                    taken = scales.part(expert)
                    yield taken.ref, taken.span


def _gaps(held: Iterable[Range], size: int) -> Iterator[Range]:
    """Yield the ranges of a file that no tensor holds."""
    at = 0
    for begin, end in sorted(held):
        if begin > at:
            yield at, begin
        at = max(at, end)
    if at < size:
        yield at, size


def _merged(ranges: Iterable[Range]) -> Iterator[Range]:
    """Join ranges that overlap or touch; empty ones are none."""
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif begin < end:
            merged.append((begin, end))
    yield from merged
