"""Many experts in one call, on tensors of a device: each row is what one expert alone would be."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeconv.kernels.cpu import CpuKernels
from moeconv.kernels.fastest import fastest_batch
from moeconv.kernels.reference import ReferenceKernels
from moeconv.layouts.verbs import (
    DeviceKernels,
    GlobalScale,
    MarlinRows,
    MarlinWeight,
    RowBlocks,
    Verb,
)
from tests.conftest import HAS_CUDA

if TYPE_CHECKING:
    from moeconv.tensors import Bytes

VERBS = ("row blocks", "marlin weight", "marlin rows")

small = st.integers(1, 3)
halves = st.integers(1, 2)
row_blocks = st.builds(
    lambda units, whole, blocks, gated: RowBlocks(
        32 * units, 128 * blocks, gated=gated, unit_rows=32 * units if whole else 32
    ),
    small,
    st.booleans(),
    st.integers(1, 9),
    st.booleans(),
)
marlin_weight = st.builds(
    MarlinWeight, small.map(lambda n: 64 * n), halves, st.integers(1, 9), stored=st.booleans()
)


@st.composite
def marlin_rows(draw: st.DrawFn) -> MarlinRows:
    parts, item = draw(halves), draw(st.sampled_from([1, 2]))
    kinds = ["plain"] if item > 1 else ["plain", "recode", "bf16", "f32"]
    kind = draw(st.sampled_from(kinds))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    tables = [bytes(rng.integers(0, 256, 256, np.uint8)) for _ in range(parts)]
    return MarlinRows(
        64 * draw(small),
        parts,
        draw(st.integers(1, 9)),
        item,
        draw(st.sampled_from(["wide", "single", "bias"])),
        stored=draw(st.booleans()),
        recode=tuple(tables) if kind == "recode" else (),
        power_bytes={"bf16": 2, "f32": 4}.get(kind, 0),
    )


def shape(verb: Verb) -> tuple[int, int]:
    match verb:
        case RowBlocks():
            return verb.rows, verb.row_bytes
        case MarlinWeight():
            return verb.halves * verb.rows, 8 * verb.tiles
        case MarlinRows():
            return verb.halves * verb.rows, verb.groups * (verb.power_bytes or verb.item_bytes)
        case GlobalScale():
            return 2, 4


def size(verb: Verb) -> int:
    rows, row_bytes = shape(verb)
    match verb:
        case MarlinRows() if verb.power_bytes:
            return rows * verb.groups
        case GlobalScale():
            return 4
        case _:
            return rows * row_bytes


def on(kernels: DeviceKernels, array: Bytes) -> torch.Tensor:
    return torch.from_numpy(array).to(kernels.device)


@pytest.mark.parametrize("verbs", [row_blocks, marlin_weight, marlin_rows()], ids=VERBS)
@settings(max_examples=12)
@given(data=st.data())
def test_each_row_is_one_expert(verbs, device_kernels, data):
    device = device_kernels
    verb, count = data.draw(verbs), data.draw(small)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    sources = rng.integers(0, 256, (count, *shape(verb)), np.uint8)
    outs = torch.full((count, size(verb)), 0xA5, dtype=torch.uint8, device=device.device)
    device.lay_out_batch(verb, on(device, sources.reshape(count, -1)), outs)
    back = torch.full((count, sources[0].size), 0x5A, dtype=torch.uint8, device=device.device)
    device.invert_batch(verb, outs, back)
    for source, out, returned in zip(sources, outs.cpu().numpy(), back.cpu().numpy(), strict=True):
        expected, before = np.empty_like(out), np.empty_like(source)
        ReferenceKernels().lay_out(verb, source, expected)
        np.testing.assert_array_equal(out, expected)
        CpuKernels().invert(verb, expected, before)
        np.testing.assert_array_equal(returned.reshape(before.shape), before)


def test_global_scales_go_one_by_one(device_kernels):
    device = device_kernels
    verb = GlobalScale(119, 2.0, "BF16", reciprocal=False, largest=True)
    scales = np.array([[1e-4, 2e-4], [3e-4, 1e-5], [0.5, 0.25]], np.float32).view(np.uint8)
    outs = torch.empty((3, 2), dtype=torch.uint8, device=device.device)
    device.lay_out_batch(verb, on(device, scales), outs)
    for source, out in zip(scales, outs.cpu().numpy(), strict=True):
        expected = np.empty(2, np.uint8)
        CpuKernels().lay_out(verb, source, expected)
        np.testing.assert_array_equal(out, expected)


def test_a_device_set_is_one_and_the_host_is_none(device_kernels):
    assert isinstance(device_kernels, DeviceKernels)
    assert not isinstance(CpuKernels(), DeviceKernels)


def test_triton_is_taken_where_it_runs():
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    assert fastest_batch(torch.device("cuda:0" if HAS_CUDA else "cpu")).name == "triton"


def test_torch_is_taken_where_triton_has_no_device():
    code = (
        "import torch; from moeconv.kernels.fastest import fastest_batch;"
        "print(fastest_batch(torch.device('cpu')).name)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout == "torch\n"
