"""What would the engine hold of an expert? By the engines' words, and not by the plan's verbs.

An inverse has the faults of the recipe that it undoes: which projections stand in which order,
which permutation, what is taken out of the scales. Here the recipe of `words` is followed from the
source to what the engine holds, and what a reader makes of the stored bytes must be that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from moeconv.errors import VerifyError
from moeconv.kernels import witness
from moeconv.restoration.scales import Scales
from moeconv.restoration.words import FAULT, FLASHINFER, WORDS, Words, part_of, whole_matrix

if TYPE_CHECKING:
    from moeconv.checkpoint.reader import Reader
    from moeconv.layouts.layout import Placement, Slice
    from moeconv.planning.jobs import Converted
    from moeconv.planning.plan import Plan
    from moeconv.tensors import Bytes, TensorSpec


@dataclass(frozen=True, slots=True)
class Witnessed:
    """An expert's tensor was laid out by others too, and is equal; `None` where nobody could."""

    by: str | None


class Witness:
    """Compares a sample of the stored experts with what the engine would make of the source.

    Parameters
    ----------
    plan
        What was converted; of a layout without a row in `words` nothing is compared.
    reader
        The source; of each projection the whole matrix is read, and cut here.
    """

    def __init__(self, plan: Plan, reader: Reader) -> None:
        self._plan, self._reader = plan, reader
        self._is_known = plan.target.layout.id in WORDS
        self._words = WORDS.get(plan.target.layout.id, Words())
        self._scales = Scales(plan, reader, self._words)

    def see(
        self, tensor: Converted, expert: int, source: Bytes, stored: Bytes
    ) -> Iterator[Witnessed]:
        """Note an expert's source matrix, and compare what is stored if it is of the sample.

        Raises
        ------
        VerifyError
            The engine makes something else of it.
        """
        is_sampled = expert - tensor.experts[0] in _sample(tensor, self._plan.id)
        by = None
        if self._is_known:
            with contextlib.suppress(ImportError):
                self._scales.note(tensor, expert, source)
                by = self._compare(tensor, expert, stored) if is_sampled else None
        if is_sampled:
            yield Witnessed(by)

    def finish(self) -> None:
        """Compare what is a whole layer's, once all of its experts were seen.

        Raises
        ------
        VerifyError
            The engine would take other factors out of its scales.
        """
        with contextlib.suppress(ImportError):
            self._scales.check_factors()

    def _compare(self, tensor: Converted, expert: int, stored: Bytes) -> str:
        """Say by whose words an expert is stored right."""
        place = self._placement(tensor)
        theirs = self._made(tensor, expert, (place or tensor.output).spec)
        ours = _placed(place, stored) if place else stored
        if not np.array_equal(theirs, ours):
            at = int(np.flatnonzero(theirs != ours)[0])
            message = (
                f"`{tensor.name}` is not what {self._words.by} makes of its source: expert "
                f"{expert}, byte {at} in the engine: expected {theirs[at]}, found {ours[at]}"
            )
            raise VerifyError(message, hint=FAULT)
        return self._words.by

    def _placement(self, tensor: Converted) -> Placement | None:
        """Return what a single rank reads of a file for any; `None` if it is one rank's own."""
        if tensor.rank is not None:
            return None
        places = self._plan.target.layout.placements(tensor.stack.geometry, 1, 0)
        return next(place for place in places if place.param == tensor.output.param)

    def _made(self, tensor: Converted, expert: int, spec: TensorSpec) -> Bytes:
        """Return what the engine holds of an expert's parameter, whose shape there is known."""
        part, names, stack = part_of(tensor), self._words.projections(tensor), tensor.stack
        if part == "global_scale":
            return self._scales.of_all(tensor, expert)
        matrices = [whole_matrix(self._reader, stack, (name, part), expert) for name in names]
        if part == "weight_scale":
            matrices = self._scales.blocks(tensor, expert, matrices)
        cut = _cut_down if names == ("down",) else _cut_rows
        shape = self._shape(part, spec, len(names))
        halves = [
            _padded(cut(matrix, part, tensor.cut, stack.geometry.intermediate), shape)
            for matrix in matrices
        ]
        if part != "weight":
            return witness.marlin_rows(halves, 2 if part == "bias" else 1)
        if self._words.by == FLASHINFER:
            return witness.trtllm_blocks(halves)
        return witness.marlin_weight(halves)

    def _shape(self, part: str, spec: TensorSpec, count: int) -> tuple[int, int]:
        """Return rows and bytes a row of each of `count` matrices, by the engine's shape of all."""
        if part == "bias":
            return spec.shape[0] // count, 2
        if self._words.by == FLASHINFER:
            blocks, rows, values = spec.shape
            return rows // count, blocks * values * 2
        lines, width = spec.shape
        if part == "weight_scale":
            return width // count, lines
        return width // 2 // count, lines * 8  # a line is 16 values of each row: two words


def _sample(tensor: Converted, plan_id: str) -> set[int]:
    """Return which of its experts others lay out: the first, the last, and one by a digest."""
    count = len(tensor.experts)
    return {0, count - 1, xxhash.xxh3_64_intdigest(f"{plan_id}/{tensor.name}".encode()) % count}


def _cut_rows(matrix: Bytes, part: str, cut: Slice, intermediate: int) -> Bytes:
    """Return a rank's rows of gate, up or both."""
    del part
    share = len(matrix) // intermediate
    return matrix[cut.start * share : cut.stop * share]


def _cut_down(matrix: Bytes, part: str, cut: Slice, intermediate: int) -> Bytes:
    """Return a rank's columns of down; its bias is the first rank's alone."""
    if part == "bias":
        return matrix if cut.start == 0 else matrix[:0]
    begin, end = (at * matrix.shape[1] // intermediate for at in (cut.start, cut.stop))
    return matrix[:, begin:end]


def _padded(matrix: Bytes, shape: tuple[int, int]) -> Bytes:
    out = np.zeros(shape, np.uint8)
    out[: matrix.shape[0], : matrix.shape[1]] = matrix
    return out


def _placed(place: Placement, stored: Bytes) -> Bytes:
    """Return what a reader makes of a stored expert."""
    items = stored[place.begin : place.end].view(f"V{place.item_bytes}")
    taken = items.reshape(place.stored).transpose(place.axes)
    out = np.zeros(place.spec.nbytes, np.uint8)
    window = out.view(items.dtype).reshape(place.final)
    window[tuple(slice(size) for size in taken.shape)] = taken
    return out
