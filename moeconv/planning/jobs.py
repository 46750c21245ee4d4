"""What is one output shard made of, and what must be read for each piece of it?

A `Job` is one shard: the unit of work, of commit, of resume and of parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from moeconv.checkpoint.types import Part, TensorRef
from moeconv.layouts.layout import Matrix, Output, Slice
from moeconv.output.shard import ShardLayout, arrange, shard_metadata
from moeconv.planning.stacks import Stack
from moeconv.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Place:
    """A source part and where its rows start in the source matrix."""

    part: Part
    row: int


@dataclass(frozen=True, slots=True)
class Lot:
    """The same place of consecutive experts, which differ in the tensor, or the index into it.

    Attributes
    ----------
    first
        That of the first expert.
    refs
        The tensor of each expert.
    """

    first: Place
    refs: tuple[TensorRef, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are read for one expert."""
        begin, end = self.first.part.span
        return end - begin

    @property
    def begins(self) -> tuple[int, ...]:
        """The byte of its tensor that each expert's start at."""
        part = self.first.part
        begin, _ = part.span
        if part.expert is None:
            return (begin,) * len(self.refs)
        return tuple(begin + i * part.matrix_bytes for i in range(len(self.refs)))

    @property
    def parts(self) -> Iterator[Part]:
        """The part of each expert."""
        part = self.first.part
        for i, ref in enumerate(self.refs):
            yield replace(part, ref=ref, expert=None if part.expert is None else part.expert + i)


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
        return tuple(lot.first for lot in self.lots(range(expert, expert + 1)))

    def lots(self, experts: range) -> tuple[Lot, ...]:
        """Return the same for consecutive experts."""
        return tuple(lots(self.stack, self.output.matrix, self.cut, experts))


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


@dataclass(frozen=True, slots=True)
class Job:
    """One output shard, by its path in the output directory."""

    file: str
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)

    @property
    def is_least(self) -> bool:
        """Whether it holds one expert or one tensor, which no shard holds in part."""
        first = self.tensors[0]
        return len(first.experts if isinstance(first, Converted) else self.tensors) == 1

    def arranged(self, plan_id: str) -> ShardLayout:
        """Return where everything in the shard goes."""
        specs = {tensor.name: tensor.spec for tensor in self.tensors}
        return arrange(specs, shard_metadata(plan_id))


def pass_on(refs: Iterable[TensorRef], stem: str, most_bytes: int) -> Iterator[Job]:
    """Yield shards `<stem>-1-of-N` of tensors that keep their bytes, in the order given.

    A shard has at most `most_bytes`, but for one tensor that is larger.
    """
    shards: list[list[TensorRef]] = [[]]
    size = 0
    for ref in refs:
        if shards[-1] and size + ref.spec.nbytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(ref)
        size += ref.spec.nbytes
    for i, shard in enumerate(shards):
        if shard:
            yield Job(
                f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors",
                tuple(Passthrough(ref) for ref in shard),
            )


def lots(stack: Stack, matrix: Matrix, cut: Slice, experts: range) -> Iterator[Lot]:
    """Yield the source parts of the source matrices of consecutive experts."""
    if matrix.blank:
        return
    row = next(row for row in stack.scheme.parts if row.part == matrix.part)
    for i, projection in enumerate(matrix.projections):
        source = stack.sources[projection, matrix.part]
        part = source.part(experts.start)
        if row.axes == "matrix" and projection == "down":
            part = take(part, cols=range(cut.start // row.values, cut.stop // row.values))
        elif row.axes != "scalar" and projection != "down":
            share = 2 if projection == "gate_up" else 1
            part = take(part, rows=range(cut.start * share, cut.stop * share))
        if part.rows and part.cols:
            yield Lot(Place(part, i * matrix.rows), source.of(experts))


def take(part: Part, *, rows: range | None = None, cols: range | None = None) -> Part:
    """Return the given logical rows or columns of a part."""
    if part.transposed:
        rows, cols = cols, rows
    if rows in {None, range(len(part.rows))} and cols in {None, range(len(part.cols))}:
        return part
    return Part(
        part.ref,
        part.expert,
        part.rows if rows is None else part.rows[rows.start : rows.stop],
        part.cols if cols is None else part.cols[cols.start : cols.stop],
        part.transposed,
    )
