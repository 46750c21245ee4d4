"""Timings count what was moved; how fast it was is nobody's promise."""

from __future__ import annotations

import pytest

from moeconv.kernels.cpu import CpuKernels
from moeconv.kernels.cuda import CudaKernels
from moeconv.kernels.timing import Move, Timing, time_copy, time_kernels
from moeconv.kernels.torch import TorchBatch
from moeconv.layouts.verbs import MarlinRows, MarlinWeight

MOVES = (
    Move(MarlinWeight(64, 2, 3, stored=True), (128, 24), 128 * 24),
    Move(MarlinRows(64, 2, 4, 1, "wide", stored=True, power_bytes=4), (128, 16), 128 * 4),
)


@pytest.mark.parametrize(
    "kernels", [CpuKernels(), CudaKernels("cpu", TorchBatch)], ids=["host", "device"]
)
@pytest.mark.parametrize("back", [False, True])
def test_a_run_moves_every_expert_of_every_move(back, kernels):
    timing = time_kernels(kernels, MOVES, experts=3, back=back)
    assert timing.way == kernels.name
    assert timing.nbytes == 3 * 128 * (24 + 24 + 16 + 4)
    assert timing.seconds > 0


def test_a_copy_reads_and_writes():
    timing = time_copy("cpu", 1 << 20)
    assert (timing.way, timing.nbytes) == ("copy", 1 << 20)


def test_a_rate_counts_both():
    assert Timing("copy", 8, 2.0).bytes_per_s == 4.0
