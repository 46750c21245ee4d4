"""How do elements move on this device?"""

from __future__ import annotations

import ctypes.util
from typing import TYPE_CHECKING

from moeconv.errors import UnsupportedError
from moeconv.kernels.cpu import CpuKernels
from moeconv.share import own_gpu

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Kernels


def pick(device: str) -> Kernels:
    """Return the kernels for `auto`, `cpu`, `cuda` or `cuda:<n>`.

    Under `torchrun`, `cuda` is a GPU for each process. Torch is imported only where a CUDA driver
    is installed, since that takes seconds.

    Raises
    ------
    UnsupportedError
        No such device.
    """
    if device == "auto":
        device = "cuda" if _has_cuda() else "cpu"
    if device == "cpu":
        return CpuKernels()
    if device == "cuda" or device.removeprefix("cuda:").isdigit():
        from moeconv.kernels.cuda import CudaKernels
        from moeconv.kernels.fastest import fastest_batch

        return CudaKernels(own_gpu() if device == "cuda" else device, fastest_batch)
    message = f"`--device {device}` is none of auto, cpu, cuda and cuda:<n>"
    raise UnsupportedError(message)


def _has_cuda() -> bool:
    if ctypes.util.find_library("cuda") is None:
        return False
    import torch

    return torch.cuda.is_available()
