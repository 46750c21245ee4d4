"""What every test may ask for: tiny checkpoints, conversions of them, and each kernel set."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from moeconv.kernels.cpu import CpuKernels
from tests import runs
from tests.sources import Tiny, write_tiny

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Kernels

# A console keeps the width that it finds when it is made: make it here, where none is set.
os.environ.pop("COLUMNS", None)
import_module("moeconv.report")

# Examples are cheap here, but a busy machine is slow now and then.
settings.register_profile("moeconv", deadline=None, max_examples=60)
settings.load_profile("moeconv")


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny checkpoint, by the fields of `Tiny`, and return its directory."""

    def make(name: str = "source", **fields: Any) -> Path:
        return write_tiny(tmp_path / name, Tiny(**fields))

    return make


@pytest.fixture
def source(make_checkpoint: Callable[..., Path]) -> Path:
    """A tiny Qwen3-MoE checkpoint."""
    return make_checkpoint()


@pytest.fixture
def converted(source: Path, tmp_path: Path) -> Path:
    """The checkpoint `source`, converted."""
    return runs.run(source, tmp_path / "converted")


def _cpu() -> Kernels:
    return CpuKernels()


def _reference() -> Kernels:
    from moeconv.kernels.reference import ReferenceKernels

    return ReferenceKernels()


def _torch() -> Kernels:
    from moeconv.kernels.cuda import CudaKernels

    return CudaKernels("cpu")


def _cuda() -> Kernels:
    from moeconv.kernels.cuda import CudaKernels

    return CudaKernels("cuda:0")


@pytest.fixture(
    params=[
        pytest.param(_cpu, id="cpu"),
        pytest.param(_reference, id="reference"),
        pytest.param(_torch, id="torch"),
        pytest.param(_cuda, id="cuda", marks=pytest.mark.gpu),
    ],
    scope="session",
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each kernel set."""
    made: Kernels = request.param()
    return made
