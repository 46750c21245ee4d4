"""Who goes where: the whole decision, before a byte is moved.

A `Job` is one output shard: the unit of work, of commit, of resume and of parallelism. Shards are
cut at layer and expert-range boundaries, so a stored tensor never spans two.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from moeconv.checkpoint.types import Checkpoint, Part, TensorRef
from moeconv.errors import SourceError, UnsupportedError
from moeconv.experts import Experts, Stack, find_experts
from moeconv.families import FAMILIES
from moeconv.layouts.layout import Facts, Geometry, Layout, Matrix, Output, Slice
from moeconv.layouts.verbs import Verb
from moeconv.modelconfig import model_types
from moeconv.naming import find_modules
from moeconv.tensors import TensorSpec

if TYPE_CHECKING:
    from moeconv.families.family import Family

DEFAULT_SHARD_BYTES: Final = 5_000_000_000
TP_SIZES: Final = (1, 2, 4, 8, 16, 32)
"""Tensor-parallel sizes that reports try; readers take any."""


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
    """

    layout: Layout
    fingerprint: Mapping[str, str]
    tp: int | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    layers: tuple[int, int] | None = None
    reconciles: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """A source part and where its rows start in the source matrix."""

    part: Part
    row: int


@dataclass(frozen=True, slots=True)
class Converted:
    """An engine parameter of a range of experts."""

    stack: Stack
    output: Output
    cut: Slice
    experts: range
    rank: int | None

    @property
    def name(self) -> str:
        """Name in the shard: prefix, parameter, rank if any, first and last expert."""
        rank = "" if self.rank is None else f".rank{self.rank}"
        first, last = self.experts[0], self.experts[-1]
        return f"{self.stack.prefix}.{self.output.param}{rank}.{first}-{last}"

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape of the whole range."""
        return self.output.spec.stacked(len(self.experts))

    def places(self, expert: int) -> tuple[Place, ...]:
        """Return what to read for one expert, and the row of the matrix it starts at."""
        return tuple(places(self.stack, self.output.matrix, self.cut, expert))


@dataclass(frozen=True, slots=True)
class Passthrough:
    """A tensor that keeps its name and its bytes."""

    ref: TensorRef

    @property
    def name(self) -> str:
        """Name in the shard."""
        return self.ref.name

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape."""
        return self.ref.spec


Tensor: TypeAlias = "Converted | Passthrough"
Known: TypeAlias = "Mapping[tuple[str, int | None], Facts]"
"""Facts by the prefix of a stack, and the rank where the file is made for one TP size."""


@dataclass(frozen=True, slots=True)
class Job:
    """One output shard, by its path in the output directory."""

    file: str
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)


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
    facts
        What a survey found of each stack and rank; `None` until it was made.
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
        if not self.facts:
            return tensor.output.verb
        facts = self.facts[tensor.stack.prefix, tensor.rank]
        return self.target.layout.bind(tensor.output, facts, expert)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in all shards."""
        return sum(job.nbytes for job in self.jobs)


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
    taken = _taken(experts.stacks, target)
    stacks = _chosen(taken, target.layers)
    jobs = (*_expert_jobs(stacks, target), *_weight_jobs(checkpoint, taken, target))
    identity = _identity(checkpoint, target, family)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Plan(
        id=digest,
        identity=identity,
        target=target,
        family=family,
        stacks=stacks,
        left_stacks=tuple(stack for stack in experts.stacks if stack not in taken),
        extra_experts=len(experts.extra),
        left_out=_left_out(stacks, target),
        jobs=jobs,
        warnings=checkpoint.warnings,
    )


def pick_family(checkpoint: Checkpoint, name: str | None = None) -> Family:
    """Return the family of a checkpoint, by name or by its `model_type`.

    Raises
    ------
    UnsupportedError
        There is none.
    """
    known = ", ".join(family.name for family in FAMILIES)
    if name:
        for family in FAMILIES:
            if family.name == name:
                return family
        message = f"`--family {name}` is no family that moeconv knows"
        raise UnsupportedError(message, hint=f"known families: {known}")
    types = model_types(checkpoint.config)
    for model_type in types:
        for family in FAMILIES:
            if model_type in family.model_types:
                return family
    shown = f"model_type {' / '.join(types)}" if types else "no model_type"
    message = f"`config.json` says {shown}, which no family of moeconv names"
    raise UnsupportedError(message, hint=_family_hint(checkpoint))


def named_alike(checkpoint: Checkpoint) -> tuple[Family, ...]:
    """Return the families whose names some tensors have, whatever the config says."""
    kinds = {re.sub(r"\d+", "0", name): ref for name, ref in checkpoint.tensors.items()}
    refs = [TensorRef(name, ref.spec, ref.file, ref.begin) for name, ref in kinds.items()]
    return tuple(family for family in FAMILIES if find_modules(refs, family).layers)


def _family_hint(checkpoint: Checkpoint) -> str:
    """Say which `--family` reads a checkpoint of an unknown model."""
    read: dict[str, Experts] = {}
    refused: dict[str, str] = {}
    for family in named_alike(checkpoint):
        try:
            read[family.name] = find_experts(checkpoint, family)
        except (SourceError, UnsupportedError) as error:
            refused[family.name] = str(error)
    names = ", ".join(read or refused)
    if not names:
        known = ", ".join(family.name for family in FAMILIES)
        return f"nor are its experts named as one of them names its own: {known}"
    if not read:
        return f"its experts are named as in {names}, but {next(iter(refused.values()))}"
    if len(read) == 1:
        return f"`--family {names}` reads its experts; say so if the model is built alike"
    if all(experts == next(iter(read.values())) for experts in read.values()):
        return f"say `--family` with one of these, which all read its experts alike: {names}"
    return (
        f"its experts can be read as in {names}, which take the same bytes in different orders; "
        "find the right one in the model's own code, then say `--family`"
    )


def served_tp(layout: Layout, geometry: Geometry) -> tuple[int, ...]:
    """Return the TP sizes that an any-TP file of these experts serves."""
    return tuple(tp for tp in TP_SIZES if layout.tp_refusal(geometry, tp) is None)


def places(stack: Stack, matrix: Matrix, cut: Slice, expert: int) -> Iterator[Place]:
    """Yield the source parts of one expert's source matrix."""
    if matrix.blank:
        return
    row = next(row for row in stack.scheme.parts if row.part == matrix.part)
    for i, projection in enumerate(matrix.projections):
        source = stack.sources[projection, matrix.part]
        part = source.part(expert)
        if row.axes == "matrix" and projection == "down":
            part = take(part, cols=range(cut.start // row.values, cut.stop // row.values))
        elif row.axes != "scalar" and projection != "down":
            share = 2 if projection == "gate_up" else 1
            part = take(part, rows=range(cut.start * share, cut.stop * share))
        if part.rows and part.cols:
            yield Place(part, i * matrix.rows)


def take(part: Part, *, rows: range | None = None, cols: range | None = None) -> Part:
    """Return the given logical rows or columns of a part."""
    if part.transposed:
        rows, cols = cols, rows
    return Part(
        part.ref,
        part.expert,
        part.rows if rows is None else part.rows[rows.start : rows.stop],
        part.cols if cols is None else part.cols[cols.start : cols.stop],
        part.transposed,
    )


def _taken(stacks: Iterable[Stack], target: Target) -> tuple[Stack, ...]:
    """Return the stacks that the layout takes; the others must be of a kind that it leaves."""
    layout = target.layout
    taken = []
    left = None
    for stack in stacks:
        if stack.scheme.name not in layout.schemes:
            left = left or stack
            if stack.scheme.name not in layout.leaves:
                raise _wrong_scheme(stack, layout)
            continue
        sizes = stack.geometry
        if not (sizes.experts and sizes.hidden and sizes.intermediate):
            message = (
                f"the experts of `{stack.prefix}` are empty: {sizes.experts} experts, hidden "
                f"{sizes.hidden}, intermediate {sizes.intermediate}"
            )
            raise SourceError(message)
        reason = layout.refusal(sizes)
        if sizes.order not in layout.orders:
            reason = f"it keeps gate and up in pairs, and these are stored as {sizes.order}"
        if reason is None and target.tp is not None:
            reason = layout.rank_refusal(stack.geometry, target.tp)
        if reason:
            message = f"{layout.id} cannot hold the experts of `{stack.prefix}`: {reason}"
            raise UnsupportedError(message)
        taken.append(stack)
    if not taken and left:
        raise _wrong_scheme(left, layout)
    return tuple(taken)


def _wrong_scheme(stack: Stack, layout: Layout) -> UnsupportedError:
    ref = stack.sources["down", "weight"].refs[0]
    message = (
        f"the experts of `{stack.prefix}` are stored as {stack.scheme.name} (`{ref.name}` is "
        f"{ref.spec.dtype}), but {layout.id} takes {' or '.join(layout.schemes)}"
    )
    hint = stack.scheme.advice
    if layout.verb == "trtllm" and "fp4" in stack.scheme.name:
        hint = "`moeconv marlin-fp4` takes these"
    return UnsupportedError(message, hint=hint)


def _chosen(stacks: tuple[Stack, ...], layers: tuple[int, int] | None) -> tuple[Stack, ...]:
    if layers is None:
        return stacks
    first, last = layers
    chosen = tuple(stack for stack in stacks if first <= stack.layer <= last)
    if not chosen:
        known = f"{stacks[0].layer} to {stacks[-1].layer}"
        message = f"`--layers {first}-{last}` holds no layer with experts; they are in {known}"
        raise UnsupportedError(message)
    return chosen


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
    shards: list[list[TensorRef]] = [[]]
    size = 0
    for ref in left:
        if shards[-1] and size + ref.spec.nbytes > target.max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(ref)
        size += ref.spec.nbytes
    for i, refs in enumerate(shards):
        if refs:
            yield Job(
                f"weights/weights-{i + 1:05}-of-{len(shards):05}.safetensors",
                tuple(Passthrough(ref) for ref in refs),
            )


def _identity(checkpoint: Checkpoint, target: Target, family: Family) -> dict[str, str]:
    files = [[f.name, f.size, f.header_sha256, f.probe_xxh3] for f in checkpoint.files]
    config = json.dumps(checkpoint.config, sort_keys=True)
    layers = "all" if target.layers is None else "{}-{}".format(*target.layers)
    return {
        "source files": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        "source config": hashlib.sha256(config.encode()).hexdigest(),
        "family": family.name,
        "layout": f"{target.layout.id} version {target.layout.version}",
        "serving dtype": target.layout.dtype,
        "global scales": "largest" if target.reconciles else "the engine's",
        "fingerprint": json.dumps(dict(target.fingerprint), sort_keys=True),
        "tp": "any" if target.tp is None else str(target.tp),
        "max shard size": str(target.max_shard_bytes),
        "layers": layers,
    }
