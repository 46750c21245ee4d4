"""The fingerprint tells two byte orders apart, and nothing else."""

from __future__ import annotations

import hashlib

import pytest

from moeconv.kernels.cpu import CpuKernels
from moeconv.layouts import LAYOUTS, TRTLLM_BF16
from moeconv.layouts.fingerprint import fingerprint


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_every_kernel_set_has_the_same_fingerprint(layout, kernels):
    assert fingerprint(layout, kernels) == fingerprint(layout, CpuKernels())


def test_it_names_every_parameter():
    params = {"w13_weight", "w2_weight"}
    expected = {f"{kind}.{param}" for kind in ("gated", "plain") for param in params}
    assert fingerprint(TRTLLM_BF16, CpuKernels()).keys() == expected


def test_other_bytes_have_another_fingerprint():
    class Idle(CpuKernels):
        def lay_out(self, verb, source, out):
            out[:] = source.reshape(-1)

    right, wrong = (fingerprint(TRTLLM_BF16, kernels) for kernels in (CpuKernels(), Idle()))
    assert all(right[name] != wrong[name] for name in right)


def test_the_bytes_of_this_version():
    """Whoever changes these raises the layout's version."""
    text = repr(sorted(fingerprint(TRTLLM_BF16, CpuKernels()).items()))
    assert (TRTLLM_BF16.version, hashlib.sha256(text.encode()).hexdigest()[:16]) == (
        1,
        "2ef2e5e2149ebe37",
    )
