"""Who goes where: the whole decision, before a byte is moved.

Shards are cut at layer and expert-range boundaries, so a stored tensor never spans two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from moeconv.counts import check_count
from moeconv.layouts.layout import Facts, Layout, Slice
from moeconv.layouts.verbs import Verb
from moeconv.output.manifest import FactsEntry, StackEntry
from moeconv.planning.experts import find_experts
from moeconv.planning.fitting import fit, served_tp
from moeconv.planning.identity import identity_of
from moeconv.planning.jobs import Converted, Job, pass_on
from moeconv.planning.recognition import pick_family
from moeconv.planning.stacks import Experts, Stack
from moeconv.planning.trial import chosen

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.families.family import Family

DEFAULT_SHARD_BYTES: Final = 5_000_000_000

_HEADER_BYTES: Final = 1 << 16
"""More than the header takes of a shard with one expert or one tensor."""


@dataclass(frozen=True, slots=True)
class Target:
    """All that decides the bytes, beside the source.

    Attributes
    ----------
    layout
        What the engine wants.
    fingerprint
        Digests of a fixed probe, laid out by the kernels in use.
    tp
        `None` for one file that serves every TP size, else the size it is made for.
    max_shard_bytes
        Above this a layer's experts are cut into several shards.
    layers
        The layers to convert, for a trial; `None` for all.
    reconciles
        The layout folds differing global scales into the larger one.
    sidecar
        What the layout cannot give back is kept beside it, where the whole model is converted.

    Raises
    ------
    UnsupportedError
        The TP size or the size of a shard is no whole number above 0.
    """

    layout: Layout
    fingerprint: Mapping[str, str]
    tp: int | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    layers: tuple[int, int] | None = None
    reconciles: bool = False
    sidecar: bool = True

    def __post_init__(self) -> None:
        """Refuse what is no number of ranks, and no size."""
        if self.tp is not None:
            check_count("tp", self.tp, least=1)
        check_count("max_shard_bytes", self.max_shard_bytes, least=1)

    @property
    def has_sidecar(self) -> bool:
        """Whether the source can be restored: of some layers alone it cannot."""
        return self.sidecar and self.layers is None


Known: TypeAlias = "Mapping[tuple[str, int | None], Facts]"
"""Facts by the prefix of a stack, and the rank where the file is made for one TP size."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole decision.

    Attributes
    ----------
    id
        Digest of all that decides the bytes; equal ids may share an output directory.
    identity
        What the id is a digest of, so that two plans can be told apart in words.
    stacks
        The layers to convert.
    left_stacks
        Layers whose experts the layout leaves as they are, since their scheme is another.
    extra_experts
        How many tensors of experts outside these layers pass through.
    left_out
        How many source tensors of each part the layout has no use for, by part.
    warnings
        What is odd about the checkpoint, and what of the wishes cannot be kept.
    facts
        What a survey found of each stack and rank; `None` until it was made. Only then are the
        shards of the sidecar among the jobs.
    """

    id: str
    identity: Mapping[str, str]
    target: Target
    family: Family
    stacks: tuple[Stack, ...]
    left_stacks: tuple[Stack, ...]
    extra_experts: int
    left_out: Mapping[str, int]
    jobs: tuple[Job, ...]
    warnings: tuple[str, ...]
    facts: Known | None = None

    def verb(self, tensor: Converted, expert: int) -> Verb:
        """Return what lays out one expert, by what the survey found of its layer."""
        facts = (self.facts or {}).get((tensor.stack.prefix, tensor.rank))
        if facts is None:
            return tensor.output.verb
        return self.target.layout.bind(tensor.output, facts, expert)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in all shards."""
        return sum(job.nbytes for job in self.jobs)


def stack_entries(plan: Plan) -> tuple[StackEntry, ...]:
    """Return the sizes of each layer to convert, as manifests keep them."""
    return tuple(
        StackEntry(
            prefix=stack.prefix,
            layer=stack.layer,
            experts=stack.geometry.experts,
            hidden=stack.geometry.hidden,
            intermediate=stack.geometry.intermediate,
            gated=stack.geometry.gated,
            order=stack.geometry.order,
            scheme=stack.scheme.name,
            tp_sizes=served_tp(plan.target.layout, stack.geometry)
            if plan.target.tp is None
            else (plan.target.tp,),
        )
        for stack in plan.stacks
    )


def facts_entries(known: Known) -> tuple[FactsEntry, ...]:
    """Return what a survey found, as manifests keep it."""
    return tuple(
        FactsEntry(prefix, rank, **asdict(facts)) for (prefix, rank), facts in known.items()
    )


def known_facts(entries: Iterable[FactsEntry]) -> Known:
    """Return what a survey found, from what a manifest kept."""
    return {
        (entry.prefix, entry.rank): Facts(
            entry.factors,
            entry.scales,
            entry.flushed,
            entry.negative,
            entry.differing,
            entry.ratios,
            entry.lossy,
            entry.unsound,
        )
        for entry in entries
    }


def make_plan(checkpoint: Checkpoint, target: Target, family_name: str | None = None) -> Plan:
    """Decide everything.

    Raises
    ------
    SourceError
        The checkpoint contradicts itself.
    UnsupportedError
        No family fits, or the target cannot hold these experts.
    """
    family = pick_family(checkpoint, family_name)
    return plan_for(checkpoint, family, find_experts(checkpoint, family), target)


def plan_for(checkpoint: Checkpoint, family: Family, experts: Experts, target: Target) -> Plan:
    """Decide everything, once it is known which tensors are the experts."""
    found = fit(experts.stacks, target.layout, target.tp)
    if found.problems:
        raise found.problems[0]
    stacks, layers, said = chosen(found.taken, target.layers)
    target = replace(target, layers=layers)
    jobs = (*_expert_jobs(stacks, target), *_weight_jobs(checkpoint, found.taken, target))
    identity = identity_of(checkpoint, target, family)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Plan(
        id=digest,
        identity=identity,
        target=target,
        family=family,
        stacks=stacks,
        left_stacks=found.left,
        extra_experts=len(experts.extra),
        left_out=_left_out(stacks, target),
        jobs=jobs,
        warnings=(*checkpoint.warnings, *said, *_warnings_of_size(jobs, target, digest)),
    )


def _expert_jobs(stacks: Iterable[Stack], target: Target) -> Iterator[Job]:
    for stack in stacks:
        for rank in (None,) if target.tp is None else range(target.tp):
            cut = (
                Slice(0, stack.geometry.intermediate)
                if target.tp is None or rank is None
                else target.layout.rank_slice(stack.geometry, target.tp, rank)
            )
            outputs = target.layout.outputs(stack.geometry, cut)
            expert_bytes = sum(output.spec.nbytes for output in outputs)
            name = stack.prefix if rank is None else f"{stack.prefix}.rank{rank}"
            for experts in _ranges(stack.geometry.experts, expert_bytes, target.max_shard_bytes):
                yield Job(
                    f"experts/{name}.{experts[0]}-{experts[-1]}.safetensors",
                    tuple(Converted(stack, output, cut, experts, rank) for output in outputs),
                )


def _ranges(count: int, size: int, limit: int) -> Iterator[range]:
    """Cut `count` experts of `size` bytes into even ranges of at most `limit` bytes."""
    shards = -(-count // max(1, limit // size))
    each = -(-count // shards)
    for first in range(0, count, each):
        yield range(first, min(first + each, count))


def _warnings_of_size(jobs: tuple[Job, ...], target: Target, plan_id: str) -> Iterator[str]:
    """Yield a sentence on the shards that cannot be as small as they were to be."""
    most = target.max_shard_bytes
    least = [job for job in jobs if job.is_least and job.nbytes + _HEADER_BYTES > most]
    over = [size for size in (job.arranged(plan_id).size for job in least) if size > most]
    if over:
        yield (
            f"{len(over)} of {len(jobs)} shards are larger than {most} bytes, since no "
            f"expert and no tensor is cut: {max(over)} bytes is the least that holds each of them"
        )


def _left_out(stacks: Iterable[Stack], target: Target) -> dict[str, int]:
    """Count the tensors of parts that no output is made of, as input scales under Marlin."""
    counts: dict[str, int] = {}
    for stack in stacks:
        whole = Slice(0, stack.geometry.intermediate)
        outputs = target.layout.outputs(stack.geometry, whole)
        used = {output.matrix.part for output in outputs}
        unused = {
            (ref.name, part)
            for (_, part), source in stack.sources.items()
            if part not in used
            for ref in source.refs
        }
        for _, part in unused:
            counts[part] = counts.get(part, 0) + 1
    return counts


def _weight_jobs(checkpoint: Checkpoint, taken: Iterable[Stack], target: Target) -> Iterator[Job]:
    converted = frozenset[str]().union(*(stack.names for stack in taken))
    left = [ref for ref in checkpoint.tensors.values() if ref.name not in converted]
    left.sort(key=lambda ref: (ref.file, ref.begin))
    yield from pass_on(left, "weights/weights", target.max_shard_bytes)
