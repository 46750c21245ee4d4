"""Power-of-two scales that a checkpoint stores as floats, against torch's own cast."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeconv.kernels.scalars import power_bytes
from moeconv.layouts.verbs import MarlinRows

_FLOATS = {4: (np.uint32, torch.float32), 2: (np.uint16, torch.bfloat16)}


def rows(size: int) -> MarlinRows:
    return MarlinRows(64, 1, 4, 1, "wide", stored=False, power_bytes=size)


def every_kind(size: int) -> np.ndarray:
    """Every exponent and sign, with the mantissas at which rounding turns."""
    if size == 2:
        return np.arange(1 << 16, dtype=np.uint16)
    mantissas = (0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF)
    heads = np.arange(512, dtype=np.uint32) << np.uint32(23)
    return np.concatenate([heads | np.uint32(mantissa) for mantissa in mantissas])


@pytest.mark.parametrize("size", [4, 2])
def test_a_float_becomes_the_byte_that_torch_casts_it_to(size: int):
    kind, dtype = _FLOATS[size]
    bits = every_kind(size)
    ours = power_bytes(rows(size), bits.view(np.uint8).reshape(1, -1)).reshape(-1)
    signed = bits.view({4: np.int32, 2: np.int16}[size])
    theirs = torch.from_numpy(signed).view(dtype).to(torch.float8_e8m0fnu).view(torch.uint8)
    assert bits.dtype == kind
    np.testing.assert_array_equal(ours, theirs.numpy())


@pytest.mark.parametrize("size", [4, 2])
def test_powers_of_two_come_back(size: int, kernels):
    exponents = np.random.default_rng(0).integers(0, 255, (64, 4), np.uint8)
    powers = torch.from_numpy(exponents).view(torch.float8_e8m0fnu).to(_FLOATS[size][1])
    source = powers.view(torch.uint8).numpy().copy()
    stored, back = np.empty(exponents.size, np.uint8), np.empty_like(source)
    kernels.lay_out(rows(size), source, stored)
    kernels.invert(rows(size), stored, back)
    np.testing.assert_array_equal(back, source)
