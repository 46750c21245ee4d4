"""What becomes of a layer's NVFP4 scales? Counted before its experts are laid out.

The rule for one scale is the engine's, and stands in `scales`; here a layer's experts follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moeconv.layouts.layout import Facts, Survey
from moeconv.layouts.marlin import scales

if TYPE_CHECKING:
    from moeconv.layouts.layout import Floats
    from moeconv.layouts.marlin.scales import Mask


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How block scales and global scales are treated.

    Attributes
    ----------
    dtype
        The serving dtype.
    takes_factor
        A power of two is taken out of a layer's block scales, and what stays small is flushed.
    reconciles
        Fold the larger of two global scales into both halves, instead of the engine's way.
    """

    dtype: str
    takes_factor: bool
    reconciles: bool

    def recode(self, factor: float, ratio: float = 1.0) -> bytes:
        """Return what each scale byte becomes, when `factor` is taken out.

        Parameters
        ----------
        factor
            The layer's power of two.
        ratio
            What the scale is multiplied with first.
        """
        table = scales.recode(factor, flush=self.takes_factor)
        if ratio == 1.0:
            return table
        return bytes(table[byte] for byte in scales.rescale(ratio))

    def facts(self, survey: Survey) -> Facts:
        """Choose the factors, and count what will not be kept."""
        ratios = self._ratios(survey)
        fused = [name for name in survey.counts if name != "down"]
        counts = {name: counts.sum(axis=0) for name, counts in survey.counts.items()}
        if ratios:
            for i, name in enumerate(fused):
                counts[name] = sum(
                    (
                        _mapped(one, scales.rescale(ratio[i]))
                        for one, ratio in zip(survey.counts[name], ratios, strict=True)
                    ),
                    start=np.zeros(256, np.int64),
                )
        w13 = sum((counts[name] for name in fused), start=np.zeros(256, np.int64))
        factors = self._factor(w13), self._factor(counts["down"])
        gate = survey.scales[fused[0]]
        return Facts(
            factors=factors,
            scales=int(w13.sum() + counts["down"].sum()),
            flushed=self._flushed(w13, factors[0]) + self._flushed(counts["down"], factors[1]),
            negative=int((w13 + counts["down"])[scales.negative()].sum()),
            differing=int(
                np.any([_differs(survey.scales[name], gate) for name in fused], axis=0).sum()
            ),
            ratios=ratios,
            lossy=tuple(self._lossy(survey, factors, ratios)),
            unsound=sum(_unsound(stored) for stored in survey.scales.values()),
        )

    def _factor(self, counts: scales.Counts) -> float:
        if not self.takes_factor or self.dtype == "float16":
            return 1.0
        return scales.factor(counts)

    def _flushed(self, counts: scales.Counts, factor: float) -> int:
        return int(counts[scales.flushed(self.recode(factor))].sum())

    def _lossy(
        self, survey: Survey, factors: tuple[float, float], ratios: tuple[tuple[float, float], ...]
    ) -> Iterator[tuple[str, int]]:
        for i, (name, counts) in enumerate(survey.counts.items()):
            factor = factors[1 if name == "down" else 0]
            for expert, one in enumerate(counts):
                ratio = ratios[expert][i] if ratios and name != "down" else 1.0
                if one[scales.lossy(self.recode(factor, ratio))].any():
                    yield name, expert

    def _ratios(self, survey: Survey) -> tuple[tuple[float, float], ...]:
        if not self.reconciles or "gate" not in survey.scales:
            return ()
        gate, up = (survey.scales[name].astype(np.float64) for name in ("gate", "up"))
        if survey.reciprocal:
            gate, up = 1 / gate, 1 / up
        largest = np.maximum(gate, up)
        largest[largest == 0] = 1  # experts that are all zeros
        return tuple(zip((gate / largest).tolist(), (up / largest).tolist(), strict=True))


def _differs(one: Floats, other: Floats) -> Mask:
    """Say of which experts two global scales differ: NaN is the same as the same NaN."""
    mask: Mask = (one != other) & (one.view(np.uint32) != other.view(np.uint32))
    return mask


def _unsound(stored: Floats) -> int:
    """Count global scales that are no positive number, as they are or as reciprocals."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / stored
    return int((~((stored > 0) & (inverse > 0) & np.isfinite(inverse))).sum())


def _mapped(counts: scales.Counts, table: bytes) -> scales.Counts:
    """Return the histogram after every byte went through a table."""
    mapped = np.zeros(256, np.int64)
    np.add.at(mapped, np.frombuffer(table, np.uint8), counts)
    return mapped
