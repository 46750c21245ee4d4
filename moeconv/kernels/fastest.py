"""Do Triton's kernels run here? It needs a C compiler, and a GPU that it has code for."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import torch

from moeconv.kernels.torch import TorchBatch
from moeconv.layouts.verbs import MARLIN_RUN_BYTES, MarlinWeight

if TYPE_CHECKING:
    from moeconv.kernels.cuda import Batch

_PROBE = MarlinWeight(64, 1, 1, stored=True)


def fastest_batch(device: torch.device) -> Batch:
    """Return Triton's kernels where they give the right bytes on a device, otherwise torch's."""
    plain = TorchBatch(device)
    try:
        from moeconv.kernels.triton import TritonBatch

        fast = TritonBatch(device)
        return fast if torch.equal(_probed(fast, device), _probed(plain, device)) else plain
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError):
        return plain


def _probed(batch: Batch, device: torch.device) -> torch.Tensor:
    source = torch.arange(MARLIN_RUN_BYTES, device=device).to(torch.uint8).view(1, -1)
    out = torch.zeros_like(source)
    with torch.cuda.device_of(source):
        batch.lay_out_batch(_PROBE, source, out)
    return out
