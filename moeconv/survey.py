"""What must be known of a layer's scales before its experts are laid out?

Reads block and global scales only, once, for layouts that ask for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from moeconv.errors import SourceError, UnsupportedError
from moeconv.jobs import Converted, places
from moeconv.kernels.marlin import count_bytes
from moeconv.layouts.layout import Facts, Slice, Survey
from moeconv.pipeline import Moved
from moeconv.plan import Known, Plan
from moeconv.reading import read_matrix, scratch_for

if TYPE_CHECKING:
    from moeconv.checkpoint.reader import Reader
    from moeconv.layouts.layout import Matrix
    from moeconv.stacks import Stack


@dataclass(frozen=True, slots=True)
class Totals:
    """The facts of all layers together."""

    scales: int = 0
    flushed: int = 0
    negative: int = 0
    differing: int = 0
    reconciled: int = 0


def surveyed_bytes(plan: Plan) -> int:
    """Return how many bytes a survey reads."""
    return sum(
        matrix.nbytes * stack.geometry.experts
        for stack, _, cut in _cuts(plan)
        for matrix in plan.target.layout.surveyed(stack.geometry, cut)
    )


def survey(plan: Plan, reader: Reader) -> Iterator[Moved | Plan]:
    """Survey every layer to be converted; yields bytes as they are read, the plan with facts last.

    Raises
    ------
    SourceError
        The source cannot be read, or holds global scales that cannot be reconciled.
    """
    known: dict[tuple[str, int | None], Facts] = {}
    for stack, rank, cut in _cuts(plan):
        layout = plan.target.layout
        counts, scales = {}, {}
        for matrix in layout.surveyed(stack.geometry, cut):
            name = matrix.projections[0]
            if matrix.part == "global_scale":
                scales[name] = np.empty(stack.geometry.experts, np.float32)
            else:
                counts[name] = np.zeros((stack.geometry.experts, 256), np.int64)
            for expert in range(stack.geometry.experts):
                values = _read(reader, stack, matrix, cut, expert)
                if matrix.part == "global_scale":
                    scales[name][expert] = values.view(np.float32)[0, 0]
                else:
                    counts[name][expert] = count_bytes(values)
                yield Moved(matrix.nbytes)
        if counts:
            found = Survey(counts, scales, stack.geometry.reciprocal)
            if plan.target.reconciles:
                _check_comparable(stack, found)
            known[stack.prefix, rank] = layout.survey(found)
    yield replace(plan, facts=known)


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


def _read(
    reader: Reader, stack: Stack, matrix: Matrix, cut: Slice, expert: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    where = tuple(places(stack, matrix, cut, expert))
    values = np.empty(matrix.shape, np.uint8)
    scratch = np.empty(scratch_for(where, matrix), np.uint8)
    read_matrix(reader, where, values, scratch)
    return values
