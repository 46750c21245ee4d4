"""Fill memory with a rank's bytes: host memory or a GPU's, through a small staging buffer.

The memory is the caller's. All of it is checked before a byte is read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from moeconv.serving import digests
from moeconv.serving.host import HostTarget, fill_host
from moeconv.serving.memory import check_apart, fillable
from moeconv.serving.runs import shape_of
from moeconv.tensors import round_up

if TYPE_CHECKING:
    from moeconv.output.files import Files
    from moeconv.serving.memory import Out
    from moeconv.serving.rank import RankTensor

STAGING_BYTES: Final = 128_000_000
"""All host buffers of one call together; more where a row of some tensor needs it."""

_PAGE: Final = 4096


def default_threads() -> int:
    """Return how many threads read where the caller does not say.

    On an H200 with 16 cores eight filled GPU memory at 31.6 GB/s from the page cache, four at 20.1.
    """
    return min(8, os.cpu_count() or 1)


def fill(
    files: Files, assignments: Sequence[tuple[RankTensor, Out]], threads: int, *, check: bool
) -> None:
    """Fill every tensor's memory.

    Raises
    ------
    ValueError
        Some memory cannot be filled, is of another size than its tensor, or overlaps with other.
    VerifyError
        A file is short, or a digest differs.
    """
    work = [(tensor, fillable(tensor, out)) for tensor, out in assignments]
    check_apart(work)
    tensors = [tensor for tensor, _ in work]
    if check:
        digests.check(files, tensors, threads, _slot(tensors, threads))
    host = [HostTarget(t, shape_of(t), out) for t, out in work if isinstance(out, np.ndarray)]
    if host:
        fill_host(files, host, threads, _slot([target.tensor for target in host], threads))
    rest = [(tensor, out) for tensor, out in work if not isinstance(out, np.ndarray)]
    if rest:
        from moeconv.serving.cuda import SPARE_SLOTS, CudaTarget, fill_cuda

        slot = _slot([tensor for tensor, _ in rest], threads + SPARE_SLOTS)
        fill_cuda(files, [CudaTarget(t, shape_of(t), out) for t, out in rest], threads, slot)


def _slot(tensors: Sequence[RankTensor], count: int) -> int:
    """Return the size of each of `count` buffers: a share, or a row, but no more than is read."""
    share = STAGING_BYTES // count // _PAGE * _PAGE
    row = max(shape_of(tensor).row_bytes for tensor in tensors)
    largest = max(tensor.read_bytes for tensor in tensors)
    return round_up(max(min(max(share, row), largest), 1), _PAGE)
