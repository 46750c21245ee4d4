"""What every test may ask for: tiny checkpoints, conversions of them, and each kernel set."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from typer.main import get_command

from moeconv.kernels.cpu import CpuKernels
from tests import runs
from tests.hub.server import Origins
from tests.hub.state import FakeHub
from tests.recording import add_row
from tests.sources import Tiny, write_tiny

if TYPE_CHECKING:
    from moeconv.layouts.verbs import DeviceKernels, Kernels

# Triton decides on import whether to interpret its kernels, which needs no GPU.
HAS_CUDA = ctypes.util.find_library("cuda") is not None
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

# Torch's threads spin while they wait for each other, and the tests have every core at work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# huggingface_hub looks for the Hub's address once, when it is imported: have one from the start.
ORIGINS = Origins()
os.environ |= FakeHub.settings(ORIGINS.url)

# A console keeps the width that it finds when it is made: make it here, where none is set.
os.environ.pop("COLUMNS", None)
import_module("moeconv.report")

# Examples are cheap here, but a busy machine is slow now and then.
settings.register_profile("moeconv", deadline=None, max_examples=60)
settings.load_profile("moeconv")


def pytest_unconfigure() -> None:
    ORIGINS.close()


@pytest.fixture(autouse=True, scope="session")
def _ask_once() -> Iterator[None]:
    """Keep two answers that are the same each time, and take longer than many a test.

    Three processes look for a library; and what a command line may say is made of signatures.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ctypes.util.find_library", cache(ctypes.util.find_library))
        patch.setattr("typer.testing._get_command", cache(get_command))
        yield


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


@pytest.fixture(scope="session")
def _origins() -> Iterator[Origins]:
    with ORIGINS.running():
        yield ORIGINS


@pytest.fixture
def hub(_origins: Origins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A Hub on loopback, empty, that this process and those it starts talk to, with a token."""
    from huggingface_hub import constants

    home = tmp_path / "hf-home"
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    hub = FakeHub(tmp_path / "hub")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    _origins.serve(hub)
    return hub


@pytest.fixture
def record() -> Callable[[str, int, str], None]:
    """Note what a suite tried for the page on reliability, if `MOECONV_RECORD` names a file."""

    def note(what: str, tried: int, result: str) -> None:
        if "MOECONV_RECORD" in os.environ:
            add_row(Path(os.environ["MOECONV_RECORD"]), what, tried, result)

    return note


def _cpu() -> Kernels:
    return CpuKernels()


def _reference() -> Kernels:
    from moeconv.kernels.reference import ReferenceKernels

    return ReferenceKernels()


def _torch(device: str = "cpu") -> Kernels:
    from moeconv.kernels.cuda import CudaKernels
    from moeconv.kernels.torch import TorchBatch

    return CudaKernels(device, TorchBatch)


def _triton(device: str = "cpu") -> Kernels:
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    from moeconv.kernels.cuda import CudaKernels
    from moeconv.kernels.triton import TritonBatch

    return CudaKernels(device, TritonBatch)


HOST = (pytest.param(_cpu, id="cpu"), pytest.param(_reference, id="reference"))
DEVICE = (
    pytest.param(_torch, id="torch"),
    pytest.param(partial(_torch, "cuda:0"), id="torch-cuda", marks=pytest.mark.gpu),
    pytest.param(partial(_triton, "cuda:0"), id="triton-cuda", marks=pytest.mark.gpu),
)
INTERPRETED = pytest.param(
    _triton,
    id="triton-interpreted",
    marks=pytest.mark.skipif(HAS_CUDA, reason="the GPU runs them"),
)


@pytest.fixture(params=(*HOST, *DEVICE, INTERPRETED), scope="session")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each kernel set."""
    made: Kernels = request.param()
    return made


@pytest.fixture(params=(*HOST, *DEVICE), scope="session")
def fast_kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each kernel set but Triton's interpreter, which is slow and knows one thread."""
    made: Kernels = request.param()
    return made


@pytest.fixture(params=(*DEVICE, INTERPRETED), scope="session")
def device_kernels(request: pytest.FixtureRequest) -> DeviceKernels:
    """Each kernel set that takes tensors of a device."""
    made: DeviceKernels = request.param()
    return made
