"""What does an engine make of a layer's scales, and what does it take out of them?

Block scales lose a power of two to the global scale under vLLM's Marlin. It is a whole layer's, so
the scales of all its experts are noted as they pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

import numpy as np

from moeconv.errors import VerifyError
from moeconv.kernels import witness
from moeconv.restoration.words import FAULT, is_down, part_of, whole_matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moeconv.checkpoint.reader import Reader
    from moeconv.planning.jobs import Converted
    from moeconv.planning.plan import Plan
    from moeconv.restoration.words import Words
    from moeconv.tensors import Bytes

    Dtype: TypeAlias = Literal["bfloat16", "float16"]

_POSITIVE: Final = 0x7F
"""Bytes below it are E4M3 numbers from zero up."""


class Scales:
    """Scales as the engine of a plan holds them.

    Parameters
    ----------
    plan
        What was converted.
    reader
        The source.
    words
        What the engine does.
    """

    def __init__(self, plan: Plan, reader: Reader, words: Words) -> None:
        self._plan, self._reader, self._words = plan, reader, words
        self._largest: dict[tuple[str, int | None], list[int]] = {}

    def blocks(self, tensor: Converted, expert: int, matrices: Sequence[Bytes]) -> list[Bytes]:
        """Return block scales as Marlin takes them, a byte each, in their rows."""
        item = tensor.stack.geometry.scale_bytes
        if item > 1:
            return [witness.power_bytes(matrix, item) for matrix in matrices]
        if "nvfp4" not in tensor.stack.scheme.name:
            return [*matrices]
        factor = self._factors(tensor.stack.prefix, tensor.rank)[is_down(tensor)]
        return [
            witness.nvfp4_scales(
                matrix if ratio == 1.0 else witness.rescaled(matrix, ratio),
                factor,
                flushes=self._words.takes_factor,
            )
            for matrix, ratio in zip(matrices, self._ratios(tensor, expert), strict=True)
        ]

    def of_all(self, tensor: Converted, expert: int) -> Bytes:
        """Return the global scale of an expert."""
        scales = self._stored(tensor, expert)
        if tensor.stack.scheme.reciprocal:
            with np.errstate(divide="ignore"):
                scales = np.float32(1) / scales
        scale = scales.max() if self._plan.target.reconciles else scales[0]
        factor = self._factors(tensor.stack.prefix, tensor.rank)[is_down(tensor)]
        dtype = cast("Dtype", self._plan.target.layout.dtype)
        return witness.marlin_global(float(scale), factor, dtype, rounds=self._words.rounds)

    def note(self, tensor: Converted, expert: int, source: Bytes) -> None:
        """Take in the block scales of an expert, `source`, if this parameter is made of them."""
        if not self._words.takes_factor or part_of(tensor) != "weight_scale":
            return
        known = self._largest.setdefault((tensor.stack.prefix, tensor.rank), [0, 0])
        halves = source.reshape(len(tensor.output.matrix.projections), -1)
        for half, ratio in zip(halves, self._ratios(tensor, expert), strict=True):
            largest = int(half.max(where=half < _POSITIVE, initial=0))
            if ratio != 1.0:  # it leaves them in their order
                largest = int(witness.rescaled(np.array([largest], np.uint8), ratio)[0])
            known[is_down(tensor)] = max(known[is_down(tensor)], largest)

    def check_factors(self) -> None:
        """Compare the factors that were taken out with what all noted scales give.

        Raises
        ------
        VerifyError
            The engine would take out others.
        """
        takes = self._plan.target.layout.dtype != "float16"
        for (prefix, rank), largest in self._largest.items():
            expected = tuple(witness.layer_factor(it) if takes else 1.0 for it in largest)
            found = self._factors(prefix, rank)
            if found != expected:
                message = (
                    f"the block scales of `{prefix}` give the factors {expected}, but it was "
                    f"converted with {found}"
                )
                raise VerifyError(message, hint=FAULT)

    def _factors(self, prefix: str, rank: int | None) -> tuple[float, float]:
        facts = (self._plan.facts or {}).get((prefix, rank))
        return facts.factors if facts else (1.0, 1.0)

    def _ratios(self, tensor: Converted, expert: int) -> tuple[float, ...]:
        """Return what `--reconcile-scales` multiplies the block scales of each half with."""
        names = self._words.projections(tensor)
        if not self._plan.target.reconciles or len(names) == 1:
            return (1.0,) * len(names)
        stored = self._stored(tensor, expert).astype(float).tolist()
        scales = [1 / scale for scale in stored] if tensor.stack.scheme.reciprocal else stored
        return tuple(scale / (max(scales) or 1.0) for scale in scales)

    def _stored(
        self, tensor: Converted, expert: int
    ) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Return the global scale of each projection, as the source has it."""
        matrices = [
            whole_matrix(self._reader, tensor.stack, (name, "global_scale"), expert)
            for name in self._words.projections(tensor)
        ]
        return np.array([matrix.reshape(-1).view(np.float32)[0] for matrix in matrices])
