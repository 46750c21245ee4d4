"""What goes through a slot at once? Experts that one verb lays out, or what passes through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final, TypeAlias

from moeconv.planning.jobs import Converted, Passthrough

if TYPE_CHECKING:
    from moeconv.conversion.budget import Sizes
    from moeconv.conversion.ring import Slot
    from moeconv.layouts.verbs import Verb
    from moeconv.output.shard import Entry
    from moeconv.planning.jobs import Job
    from moeconv.planning.plan import Plan
    from moeconv.tensors import Bytes

_MOST_STRIPS: Final = 256
"""Each strip is a read of its own, so that several workers should share thousands of them."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Consecutive experts of one parameter that one verb lays out, to `[at, at + size)`."""

    tensor: Converted
    at: int
    size: int
    experts: range
    verb: Verb

    def sides(self, slot: Slot) -> tuple[Bytes, Bytes]:
        """Return where in a slot its source matrices `[n, rows, bytes]` and results go."""
        count, matrix = len(self.experts), self.tensor.output.matrix
        sources = slot.source[: count * matrix.nbytes].reshape(count, *matrix.shape)
        return sources, slot.out[: self.size].reshape(count, self.tensor.output.spec.nbytes)


@dataclass(frozen=True, slots=True)
class Strip:
    """Bytes of a tensor that passes through, from `begin` on."""

    tensor: Passthrough
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class Strips:
    """Strips that lie side by side in the shard, at `[at, at + size)`: a sidecar has thousands."""

    strips: tuple[Strip, ...]
    at: int
    size: int

    def parts(self, out: Bytes) -> Iterator[tuple[Strip, Bytes]]:
        """Yield each strip and its bytes in `out`, which holds all of them."""
        at = 0
        for strip in self.strips:
            yield strip, out[at : at + strip.size]
            at += strip.size


Piece: TypeAlias = "Experts | Strips"


def pieces_of(job: Job, entries: Iterable[Entry], plan: Plan, sizes: Sizes) -> Iterator[Piece]:
    """Yield what fills a shard, in file order, each no larger than a slot's buffers."""
    tensors = {tensor.name: tensor for tensor in job.tensors}
    placed = [(tensors[entry.name], entry.begin) for entry in entries]
    together = _Together(sizes.out)
    for tensor, at in placed:
        if isinstance(tensor, Converted):
            yield from together.rest()
            yield from experts_of(tensor, at, plan, sizes)
        else:
            yield from together.add(tensor, at)
    yield from together.rest()


def experts_of(tensor: Converted, at: int, plan: Plan, sizes: Sizes) -> Iterator[Experts]:
    """Yield the experts of a tensor that starts at `at`, as many at once as a slot holds."""
    matrix, expert_bytes = tensor.output.matrix, tensor.output.spec.nbytes
    most = min(sizes.source // max(matrix.nbytes, 1), sizes.out // max(expert_bytes, 1))
    for verb, alike in groupby(tensor.experts, lambda expert: plan.verb(tensor, expert)):
        experts = tuple(alike)
        for first in range(experts[0], experts[-1] + 1, most):
            batch = range(first, min(first + most, experts[-1] + 1))
            size = len(batch) * expert_bytes
            yield Experts(tensor, at, size, batch, verb)
            at += size


class _Together:
    """Gathers strips that lie side by side, up to so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._strips = most_bytes, list[Strip]()
        self._at = self._size = 0

    def add(self, tensor: Passthrough, at: int) -> Iterator[Strips]:
        """Take in a tensor; yield what has become full."""
        nbytes = tensor.spec.nbytes
        for begin in range(0, nbytes, self._most):
            strip = Strip(tensor, begin, min(self._most, nbytes - begin))
            if self._size + strip.size > self._most or len(self._strips) == _MOST_STRIPS:
                yield from self.rest()
            if not self._strips:
                self._at = at + begin
            self._strips.append(strip)
            self._size += strip.size

    def rest(self) -> Iterator[Strips]:
        """Yield what is left, if anything."""
        if self._strips:
            yield Strips(tuple(self._strips), self._at, self._size)
            self._strips, self._size = [], 0
