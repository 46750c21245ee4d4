"""A batch goes to the device and back; or nowhere, where both have one memory."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from moeconv.kernels.cpu import CpuKernels
from moeconv.kernels.cuda import CudaKernels
from moeconv.kernels.station import Station, is_unified
from moeconv.kernels.torch import TorchBatch
from moeconv.layouts.verbs import GlobalScale, MarlinRows, MarlinWeight, RowBlocks

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Verb

CASES = [
    pytest.param(RowBlocks(128, 256, gated=True, unit_rows=32), (128, 256), 128 * 256, id="trtllm"),
    pytest.param(MarlinWeight(64, 2, 5, stored=True), (128, 40), 128 * 40, id="weights"),
    pytest.param(MarlinRows(64, 1, 3, 1, "wide", stored=False), (64, 3), 64 * 3, id="scales"),
    pytest.param(GlobalScale(3, 1.0, "F32", reciprocal=False), (2, 4), 4, id="global"),
]


@pytest.mark.parametrize(("integrated", "unified"), [(1, True), (0, False), (True, True)])
def test_integrated_devices_share_the_hosts_memory(integrated, unified):
    assert is_unified(SimpleNamespace(is_integrated=integrated)) is unified


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "shares"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("verb", "shape", "size"), CASES)
def test_what_comes_back_is_what_the_host_makes(verb: Verb, shape, size, device, copies):
    kernels = CudaKernels(device, TorchBatch)
    memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    rng = np.random.default_rng(0)
    with kernels.pinned(memory):
        station = Station(kernels, torch.device(device), (1 << 19, 1 << 19), copies=copies)
        for count in (1, 3):
            rows = count * shape[0] * shape[1]
            sources = memory[:rows].reshape(count, *shape)
            sources[...] = rng.integers(0, 120, sources.shape, np.uint8)
            outs = memory[1 << 19 :][: count * size].reshape(count, size)
            outs.fill(0xA5)
            station.lay_out(verb, sources, outs)
            for source, out in zip(sources, outs, strict=True):
                expected = np.empty(size, np.uint8)
                CpuKernels().lay_out(verb, source, expected)
                np.testing.assert_array_equal(out, expected)


@pytest.mark.gpu
def test_a_device_keeps_to_what_was_said():
    kernels = CudaKernels("cuda:0", TorchBatch)
    before = kernels.peak_bytes
    stations = [kernels.station(1 << 26, 1 << 26) for _ in range(3)]
    assert len(stations) == 3
    assert kernels.peak_bytes - before <= 3 * kernels.batch_bytes(1 << 26, 1 << 26)
