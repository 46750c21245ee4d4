"""How do elements move on this device?"""

from __future__ import annotations

import ctypes.util
import os
import re
from typing import TYPE_CHECKING, Final

from moeconv.errors import UnsupportedError
from moeconv.kernels.cpu import CpuKernels
from moeconv.share import own_gpu, ranks_here

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Kernels


_GPU: Final = re.compile(r"cuda:(0|[1-9]\d?|1[01]\d|12[0-7])", re.ASCII)
"""Torch counts devices in seven bits, and takes no zero before a number."""

_ENOUGH_CORES: Final = 8
"""So many do not miss a GPU, which takes seconds to start: docs/explanation/performance.md."""


def pick(device: str) -> Kernels:
    """Return the kernels for `auto`, `cpu`, `cuda` or `cuda:N`.

    `auto` is a GPU where there is one and this process has few cores. Under `torchrun`, `cuda` is a
    GPU for each process. Torch is imported only where a CUDA driver is installed, since that takes
    seconds.

    Raises
    ------
    UnsupportedError
        No such device.
    """
    device = str(device)  # `torch.device("cuda:1")` says the same
    if device == "auto":
        cores = len(os.sched_getaffinity(0)) // ranks_here()
        device = "cuda" if cores < _ENOUGH_CORES and _has_cuda() else "cpu"
    if device == "cpu":
        return CpuKernels()
    name = own_gpu() if device == "cuda" else device
    if _GPU.fullmatch(name):
        from moeconv.kernels.cuda import CudaKernels
        from moeconv.kernels.fastest import fastest_batch

        return CudaKernels(name, fastest_batch)
    message = f"`--device {device}` is none of auto, cpu, cuda and cuda:N, with N from 0 to 127"
    raise UnsupportedError(message)


def _has_cuda() -> bool:
    if ctypes.util.find_library("cuda") is None:
        return False
    import torch

    return torch.cuda.is_available()
