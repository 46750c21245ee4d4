"""Which tensors make one matrix: the row type.

A scheme is data: for each part of a quantised matrix its name suffix, dtypes, and how many values
along the input axis one element covers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Axes: TypeAlias = Literal["matrix", "rows", "scalar"]


@dataclass(frozen=True, slots=True)
class PartRow:
    """One tensor of a stored matrix.

    Attributes
    ----------
    part
        What it is, in every scheme's words: `weight`, `weight_scale`, `global_scale`, `bias`.
    suffixes
        What may follow the projection's name.
    dtypes
        Safetensors codes that it may have.
    values
        Values along the input axis that one element covers: 1 for BF16, 2 for packed FP4, the
        group size for scales.
    axes
        Whether it is a matrix, one value a row, or one value.
    optional
        Whether it may be absent; then it is absent for every expert of a layer.
    """

    part: str
    suffixes: tuple[str, ...]
    dtypes: tuple[str, ...]
    values: int = 1
    axes: Axes = "matrix"
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one matrix is stored.

    Attributes
    ----------
    name
        In words that the field uses.
    parts
        Its tensors; the first is the weight.
    advice
        For a scheme that no layout takes: what to do about it.
    reciprocal
        Global scales are stored as `1 / scale`.
    """

    name: str
    parts: tuple[PartRow, ...]
    advice: str | None = None
    reciprocal: bool = False
