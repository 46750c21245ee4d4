"""What must be known of a layer's scales before its experts are laid out?

Reads block and global scales only, once, for layouts that ask for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from moeconv.checkpoint.reader import Reader, reader_for
from moeconv.conversion.budget import default_workers
from moeconv.conversion.pipeline import Moved
from moeconv.conversion.reading import fill_matrices, scratch_for, spans_of_lots
from moeconv.errors import SourceError, UnsupportedError
from moeconv.kernels.marlin import count_bytes
from moeconv.kernels.scalars import are_powers
from moeconv.layouts.layout import Facts, Slice, Survey
from moeconv.planning.jobs import Converted, lots
from moeconv.planning.plan import Known, Plan
from moeconv.planning.sidecar import settle

if TYPE_CHECKING:
    from moeconv.checkpoint.origin import Span
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.layouts.layout import Counts, Floats, Matrix
    from moeconv.planning.jobs import Lot
    from moeconv.planning.stacks import Stack
    from moeconv.tensors import Bytes


_BATCH_BYTES: Final = 1 << 22
"""Scales that one thread looks at, one expert after the other."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The facts of all layers together."""

    scales: int = 0
    flushed: int = 0
    negative: int = 0
    differing: int = 0
    reconciled: int = 0
    unsound: int = 0


def surveyed_bytes(plan: Plan) -> int:
    """Return how many bytes a survey reads."""
    return sum(
        matrix.nbytes * stack.geometry.experts
        for stack, _, cut in _cuts(plan)
        for matrix in plan.target.layout.surveyed(stack.geometry, cut)
    )


def survey(plan: Plan, checkpoint: Checkpoint, reader: Reader) -> Iterator[Moved | Plan]:
    """Survey every layer to be converted; yields bytes as they are read, the settled plan last.

    Raises
    ------
    SourceError
        The source cannot be read, or holds global scales that cannot be reconciled.
    """
    known: dict[tuple[str, int | None], Facts] = {}
    threads = 2 * default_workers()  # nothing is digested meanwhile
    with ThreadPoolExecutor(threads, thread_name_prefix="moeconv-survey") as pool:
        for stack, rank, cut in _cuts(plan):
            matrices = plan.target.layout.surveyed(stack.geometry, cut)
            if not matrices:
                continue
            look = _Look(reader, stack, cut, _empty(matrices, stack))
            with reader.ahead(look.spans(matrices)):
                for nbytes in pool.map(look.at, *zip(*_batches(matrices, stack), strict=True)):
                    yield Moved(nbytes)
            found = look.seen.survey(stack)
            if plan.target.reconciles:
                _check_comparable(stack, found)
            known[stack.prefix, rank] = plan.target.layout.survey(found)
    yield settle(plan, checkpoint, known)


def _batches(matrices: Iterable[Matrix], stack: Stack) -> Iterator[tuple[Matrix, range]]:
    """Yield what one thread looks at: one kind of scale, of some experts."""
    count = stack.geometry.experts
    for matrix in matrices:
        most = max(1, _BATCH_BYTES // matrix.nbytes)
        for first in range(0, count, most):
            yield matrix, range(first, min(first + most, count))


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was read of a layer so far: the fields of `Survey`, while they fill."""

    scale_bytes: int
    counts: dict[str, Counts]
    scales: dict[str, Floats]
    inexact: dict[str, list[int]]

    def note(self, matrix: Matrix, experts: range, values: Bytes) -> None:
        """Take in the scales `[n, rows, bytes]` of some experts, from any thread: none has two."""
        (name,), where = matrix.projections, slice(experts.start, experts.stop)
        if matrix.part == "global_scale":
            self.scales[name][where] = values.view(np.float32)[:, 0, 0]
        elif self.scale_bytes == 1:
            self.counts[name][where] = count_bytes(values)
        else:
            are_exact = (are_powers(each, self.scale_bytes) for each in values)
            pairs = zip(experts, are_exact, strict=True)
            self.inexact[name] += [expert for expert, is_exact in pairs if not is_exact]

    def survey(self, stack: Stack) -> Survey:
        """Return it once it is full."""
        inexact = {name: tuple(sorted(experts)) for name, experts in self.inexact.items()}
        return Survey(self.counts, self.scales, stack.geometry.reciprocal, inexact)


def _empty(matrices: Iterable[Matrix], stack: Stack) -> _Seen:
    """Return room for the scales of every expert."""
    experts, scale_bytes = stack.geometry.experts, stack.geometry.scale_bytes
    named = [(matrix.projections[0], matrix.part) for matrix in matrices]
    blocks = [name for name, part in named if part != "global_scale"]
    return _Seen(
        scale_bytes,
        {name: np.zeros((experts, 256), np.int64) for name in blocks if scale_bytes == 1},
        {name: np.empty(experts, np.float32) for name, part in named if part == "global_scale"},
        {name: [] for name in blocks if scale_bytes > 1},
    )


@dataclass(frozen=True, slots=True)
class _Look:
    """Reads the scales of one layer."""

    reader: Reader
    stack: Stack
    cut: Slice
    seen: _Seen

    def lots(self, matrix: Matrix, experts: range) -> tuple[Lot, ...]:
        """Return where the scales of some experts are."""
        return tuple(lots(self.stack, matrix, self.cut, experts))

    def spans(self, matrices: Iterable[Matrix]) -> Iterator[Span]:
        """Yield what is read for these matrices, in this order."""
        for matrix, experts in _batches(matrices, self.stack):
            yield from spans_of_lots(self.lots(matrix, experts))

    def at(self, matrix: Matrix, experts: range) -> int:
        """Take in the scales of some experts; return how many bytes they are."""
        values = np.empty((len(experts), *matrix.shape), np.uint8)
        where = self.lots(matrix, experts)
        scratch = np.empty(scratch_for([lot.first for lot in where], matrix), np.uint8)
        deque(fill_matrices(self.reader, where, values, scratch), maxlen=0)
        self.seen.note(matrix, experts, values)
        return matrix.nbytes * len(experts)


def survey_all(plan: Plan, checkpoint: Checkpoint) -> Plan:
    """Survey every layer, where nobody watches the bytes; return the plan with its facts.

    Raises
    ------
    SourceError
        As `survey`.
    """
    with reader_for(checkpoint) as reader:
        events = survey(plan, checkpoint, reader)
        return next(event for event in events if isinstance(event, Plan))


def total(known: Known) -> Totals:
    """Add the facts of all layers up."""
    facts = tuple(known.values())
    layers = {prefix: fact for (prefix, _), fact in known.items()}  # each rank has all experts
    return Totals(
        scales=sum(fact.scales for fact in facts),
        flushed=sum(fact.flushed for fact in facts),
        negative=sum(fact.negative for fact in facts),
        differing=sum(fact.differing for fact in layers.values()),
        reconciled=sum(fact.differing for fact in layers.values() if fact.ratios),
        unsound=sum(fact.unsound for fact in layers.values()),
    )


def check_share(known: Known, most: float) -> None:
    """Refuse a checkpoint that would lose too many of its scales.

    Raises
    ------
    UnsupportedError
        In some layer, more than the share `most` of the block scales is flushed or negative.
    """
    for (prefix, _), facts in known.items():
        lost = facts.flushed + facts.negative
        if facts.scales and lost / facts.scales > most:
            message = (
                f"`{prefix}` would lose {lost / facts.scales:.2%} of its block scales "
                f"({facts.flushed} too small for Marlin, {facts.negative} negative or NaN), more "
                f"than {most:.2%}"
            )
            hint = "is the checkpoint sound? `--max-lost-scales PERCENT` lets it pass"
            raise UnsupportedError(message, hint=hint)


def _check_comparable(stack: Stack, found: Survey) -> None:
    """Refuse to reconcile global scales of which none is the larger."""
    for name, stored in found.scales.items():
        with np.errstate(divide="ignore"):
            values = 1 / stored if found.reciprocal else stored
        odd = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if odd.size:
            source = stack.sources[name, "global_scale"]
            ref = source.part(int(odd[0])).ref
            message = f"`{ref.name}` is {stored[odd[0]]}, which `--reconcile-scales` cannot compare"
            hint = (
                "is the checkpoint sound? without the flag its bytes become what the engine's are"
            )
            raise SourceError(message, hint=hint)


def _cuts(plan: Plan) -> Iterator[tuple[Stack, int | None, Slice]]:
    """Yield every stack, rank and slice to be converted, once."""
    seen = set()
    for job in plan.jobs:
        for tensor in job.tensors:
            if isinstance(tensor, Converted) and (tensor.stack.prefix, tensor.rank) not in seen:
                seen.add((tensor.stack.prefix, tensor.rank))
                yield tensor.stack, tensor.rank, tensor.cut
