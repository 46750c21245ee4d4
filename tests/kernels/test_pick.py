"""Which device is it? Each process of `torchrun` has its own, as long as there are enough."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moeconv.errors import UnsupportedError
from moeconv.kernels import pick
from moeconv.kernels.torch import TorchBatch


@pytest.fixture
def gpus(monkeypatch):
    """Let torch see two GPUs, of which nothing is asked but what they are."""
    monkeypatch.setattr("ctypes.util.find_library", lambda _: "libcuda.so.1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda _: SimpleNamespace(is_integrated=0)
    )
    monkeypatch.setattr("moeconv.kernels.fastest.fastest_batch", TorchBatch)


@pytest.mark.usefixtures("gpus")
def test_each_process_of_a_machine_takes_its_own_gpu(monkeypatch):
    assert pick("cuda").device == "cuda:0"
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert pick("cuda").device == f"cuda:{rank}"
        assert pick("cuda:1").device == "cuda:1"  # what was said counts, so two may share one


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("cores", "ranks", "device"),
    [(2, "1", "cuda:0"), (8, "1", "cpu"), (16, "2", "cpu"), (16, "4", "cuda:0")],
)
def test_auto_is_a_gpu_where_a_process_has_few_cores(monkeypatch, cores, ranks, device):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert pick("auto").device == device


def test_auto_is_the_cpu_where_no_driver_is(monkeypatch):
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    assert pick("auto").device == "cpu"


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("device", ["3", "cuda:255", "cuda:300", "cuda:01", "cuda:²", "cuda:", ""])
def test_what_torch_would_take_for_another_gpu_is_refused(device):
    with pytest.raises(UnsupportedError, match="is none of auto, cpu, cuda and cuda:N"):
        pick(device)


@pytest.mark.usefixtures("gpus")
def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UnsupportedError, match=r"no device `cuda:2`: torch .* sees 2"):
        pick("cuda")
