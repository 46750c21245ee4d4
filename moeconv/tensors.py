"""What a tensor is before it has bytes: a dtype code and a shape.

Dtypes are the codes of the safetensors header. Nothing is ever cast, so the only fact needed
of a dtype is how many bits an element takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    Bytes: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    """Host bytes: a buffer, or rows of one."""

BITS: Final[dict[str, int]] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits an element, by safetensors dtype code (safetensors 0.8.0, `Dtype`)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape of a tensor.

    An `F4` shape counts elements, not bytes, as in the safetensors header.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Size in bits; a multiple of 8 for every tensor a file can hold."""
        return math.prod(self.shape) * BITS[self.dtype]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.bits // 8

    def stacked(self, count: int) -> TensorSpec:
        """Return the spec of `count` such tensors along a new first axis."""
        return TensorSpec(self.dtype, (count, *self.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def round_up(value: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit
