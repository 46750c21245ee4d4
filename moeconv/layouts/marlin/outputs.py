"""Which parameters does Marlin want of one expert, and by which verb do they come about?

Shapes as vLLM 0.33.0 has them: `gptq_marlin_repack` (weights), `marlin_permute_bias` (biases).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from moeconv.layouts.layout import Matrix, Output
from moeconv.layouts.verbs import (
    MARLIN_ROWS,
    MARLIN_RUN_BYTES,
    MARLIN_TILE,
    MarlinRows,
    MarlinWeight,
)
from moeconv.tensors import TensorSpec

_WORDS: Final = MARLIN_RUN_BYTES // 4
SAFETENSORS: Final[dict[str, Literal["BF16", "F16"]]] = {"bfloat16": "BF16", "float16": "F16"}
"""What a serving dtype is called in a shard."""


@dataclass(frozen=True, slots=True)
class Fused:
    """Projections that become one parameter.

    Attributes
    ----------
    names
        The projections, one under the other.
    rows
        Rows of each, padded.
    inner
        Values a row, padded.
    """

    names: tuple[str, ...]
    rows: int
    inner: int


def weight(param: str, fused: Fused, *, stored: bool) -> Output:
    """Return the weight, I32: `[inner/16, halves 2 rows]`, or stored units of 64 rows."""
    halves, tiles = len(fused.names), fused.inner // MARLIN_TILE
    units = fused.rows // MARLIN_ROWS
    shape: tuple[int, ...] = (tiles, halves * units * _WORDS)
    if stored:
        shape = (units, halves, tiles, _WORDS)
    return Output(
        param,
        TensorSpec("I32", shape),
        Matrix(fused.names, "weight", fused.rows, fused.inner // 2),
        MarlinWeight(fused.rows, halves, tiles, stored=stored),
    )


def bias(param: str, fused: Fused, dtype: str, *, stored: bool, blank: bool = False) -> Output:
    """Return the bias: `[halves rows]`, or stored units of 64 rows; zeros where `blank`."""
    halves = len(fused.names)
    shape: tuple[int, ...] = (halves * fused.rows,)
    if stored:
        shape = (fused.rows // MARLIN_ROWS, halves, MARLIN_ROWS)
    return Output(
        param,
        TensorSpec(dtype, shape),
        Matrix(fused.names, "bias", fused.rows, 2, blank=blank),
        MarlinRows(fused.rows, halves, 1, 2, "bias", stored=stored),
    )
