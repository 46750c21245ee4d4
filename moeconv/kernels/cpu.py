"""Verbs on the host: numpy, and compiled loops where numba is installed.

One flat gather of 128-byte items covers reorder, shuffle and block layout in a single pass; items
are a void dtype, so that no value is ever interpreted. `numpy.take` releases the interpreter lock.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from moeconv.kernels.marlin import permute_rows, repack, unpermute_rows, unrepack
from moeconv.kernels.rowmaps import block_index, inverse_block_index
from moeconv.kernels.scalars import global_scale
from moeconv.layouts.verbs import (
    K_BLOCK_BYTES,
    GlobalScale,
    MarlinRows,
    MarlinWeight,
    RowBlocks,
)

if TYPE_CHECKING:
    from moeconv.kernels.rowmaps import Index
    from moeconv.layouts.verbs import Verb
    from moeconv.tensors import Bytes


@functools.cache
def _loops() -> str:
    """Return the name of the loops; numba itself is imported by those that need it."""
    return "numba" if find_spec("numba") else "numpy"


class CpuKernels:
    """Satisfies `layouts.verbs.Kernels` on the host."""

    device = "cpu"

    @property
    def name(self) -> str:
        """Which loops move nibbles: `numba` where it is installed, otherwise `numpy`."""
        return _loops()

    def lay_out(self, verb: Verb, source: Bytes, out: Bytes) -> None:
        """Fill `out`."""
        match verb:
            case RowBlocks():
                _take(source, block_index(verb), out)
            case MarlinWeight():
                repack(verb, source, out)
            case MarlinRows():
                permute_rows(verb, source, out)
            case GlobalScale():
                global_scale(verb, source, out)

    def invert(self, verb: Verb, stored: Bytes, source: Bytes) -> None:
        """Fill `source`."""
        match verb:
            case RowBlocks():
                _take(stored, inverse_block_index(verb), source)
            case MarlinWeight():
                unrepack(verb, stored, source)
            case MarlinRows():
                unpermute_rows(verb, stored, source)
            case GlobalScale():
                pass


def _take(source: Bytes, index: Index, out: Bytes) -> None:
    items = np.dtype(f"V{K_BLOCK_BYTES}")
    # mode="clip" lets numpy write into `out` directly; the index is in range by construction.
    np.take(source.reshape(-1).view(items), index, out=out.reshape(-1).view(items), mode="clip")
