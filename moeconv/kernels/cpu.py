"""Verbs on the host, in numpy.

One flat gather of 128-byte items covers reorder, shuffle and block layout in a single pass; items
are a void dtype, so that no value is ever interpreted. `numpy.take` releases the interpreter lock.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from moeconv.kernels.rowmaps import block_index, inverse_block_index
from moeconv.layouts.verbs import K_BLOCK_BYTES

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Verb
    from moeconv.tensors import Bytes


class CpuKernels:
    """Satisfies `layouts.verbs.Kernels` on the host."""

    device = "cpu"

    def empty(self, nbytes: int) -> Bytes:
        """Return a page-aligned host buffer."""
        # A map of its own starts on a page, which lets the file be written past the page cache.
        return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]

    def lay_out(self, verb: Verb, source: Bytes, out: Bytes) -> None:
        """Gather whole blocks into `out`."""
        _take(source, block_index(verb), out)

    def invert(self, verb: Verb, stored: Bytes, source: Bytes) -> None:
        """Gather whole blocks back."""
        _take(stored, inverse_block_index(verb), source)


def _take(
    source: Bytes, index: np.ndarray[tuple[int, ...], np.dtype[np.int64]], out: Bytes
) -> None:
    items = np.dtype(f"V{K_BLOCK_BYTES}")
    # mode="clip" lets numpy write into `out` directly; the index is in range by construction.
    np.take(source.reshape(-1).view(items), index, out=out.reshape(-1).view(items), mode="clip")
