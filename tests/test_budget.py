"""Memory is spent once, within its limits, and what is bought with it changes no byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.checkpoint.types import TensorRef
from moeconv.conversion.budget import (
    PIECE_BYTES,
    Limits,
    Sizes,
    budget_for,
    default_workers,
    expert_sizes,
)
from moeconv.conversion.convert import convert
from moeconv.conversion.pieces import Strips, pieces_of
from moeconv.conversion.pipeline import Moved
from moeconv.errors import UnsupportedError
from moeconv.kernels.cpu import CpuKernels
from moeconv.kernels.cuda import CudaKernels
from moeconv.kernels.torch import TorchBatch
from moeconv.layouts.verbs import DeviceKernels
from moeconv.output.directory import OutputDirectory
from moeconv.planning.jobs import pass_on
from moeconv.planning.plan import Plan
from moeconv.tensors import TensorSpec
from tests import runs
from tests.fp4.models import Model
from tests.sources import Tiny, write_tiny
from tests.test_memory import write_sparse

HOST, DEVICE = CpuKernels(), CudaKernels("cpu", TorchBatch)
AMPLE = 1 << 40


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return runs.plan(write_tiny(tmp_path_factory.mktemp("budget") / "source", Tiny()))[0]


@given(
    workers=st.integers(1, 40),
    host=st.integers(200_000, 1 << 24),
    device=st.integers(1_000_000, 1 << 24),
)
def test_limits_are_kept_and_used(plan, workers, host, device):
    limits = Limits(workers, host, device)
    for kernels in (HOST, DEVICE):
        budget = budget_for(plan.jobs, limits, kernels)
        least = expert_sizes(plan.jobs)
        assert least.total <= budget.sizes.total
        assert budget.host_bytes <= host
        assert budget.device_bytes <= device
        assert 1 <= budget.slots <= limits.slots
        assert budget.slots == limits.slots or host < limits.slots * least.total
        assert bool(budget.stations) == isinstance(kernels, DeviceKernels)


@pytest.mark.parametrize("option", ["--max-host-memory", "--max-device-memory"])
def test_a_limit_that_does_not_hold_one_expert_is_refused_with_the_figure(plan, option):
    def budget(nbytes: int) -> object:
        is_host = option == "--max-host-memory"
        limits = Limits(1, nbytes) if is_host else Limits(1, max_device_bytes=nbytes)
        return budget_for(plan.jobs, limits, DEVICE)

    with pytest.raises(UnsupportedError, match=rf"`{option}` 1000 bytes .* one expert") as error:
        budget(1000)
    needed = int(str(error.value).split(": ")[1].split()[0])
    assert budget(needed)
    with pytest.raises(UnsupportedError) as error:
        budget(needed - 1)
    assert option in (error.value.hint or "")


def test_pieces_stay_small_where_memory_is_ample(plan):
    sizes = budget_for(plan.jobs, Limits(64, AMPLE, AMPLE), HOST).sizes
    assert max(sizes.source, sizes.out) <= PIECE_BYTES
    assert sizes.source > expert_sizes(plan.jobs).source


def test_pieces_grow_with_workers_as_far_as_there_are_cores_for_them(tmp_path):
    """More of larger ones would take memory by the square of the workers."""
    jobs = runs.plan(write_sparse(tmp_path / "source", 64))[0].jobs
    found = [budget_for(jobs, Limits(n, AMPLE), HOST).sizes.total for n in (2, 8, 16, 32, 500)]
    assert found == [8 << 20, 16 << 20, 32 << 20, 32 << 20, 32 << 20]


sizes = st.lists(st.sampled_from([0, 1, 8, 300, 5000]), min_size=1, max_size=700)


@given(sizes=sizes, most=st.integers(4, 9000))
def test_what_passes_through_side_by_side_is_moved_together(plan, sizes, most):
    refs = [
        TensorRef(f"t{i}", TensorSpec("U8", (size,)), "file", 0) for i, size in enumerate(sizes)
    ]
    (job,) = pass_on(refs, "weights", sum(sizes) + 1)
    layout = job.arranged(plan.id)
    pieces = list(pieces_of(job, layout.entries, plan, Sizes(0, 0, most)))
    at, read = len(layout.header), dict.fromkeys((ref.name for ref in refs), 0)
    for piece in pieces:
        assert isinstance(piece, Strips)
        assert (piece.at, piece.size) == (at, sum(strip.size for strip in piece.strips))
        assert piece.size <= most
        at += piece.size
        for strip in piece.strips:
            assert strip.begin == read[strip.tensor.name]
            read[strip.tensor.name] += strip.size
    assert (at, [*read.values()]) == (layout.size, sizes)
    assert len(pieces) <= 1 + sum(sizes) // (most // 2) + len(sizes) // 100


@pytest.mark.parametrize("storage", ["per-expert", "stacked", "transposed", "plain"])
@pytest.mark.parametrize("kernels", [HOST, DEVICE], ids=["host", "torch"])
def test_one_expert_a_piece_or_all_of_them(make_checkpoint, tmp_path, storage, kernels):
    source = make_checkpoint(storage=storage, experts=7, layers=1)
    plan, checkpoint = runs.plan(source)
    least = expert_sizes(plan.jobs).total
    expected = runs.tree(runs.run(source, tmp_path / "expected"))
    pieces = set()
    for workers, host in ((1, least), (1, 2 * least), (3, 17 * least), (2, AMPLE)):
        out = tmp_path / f"{workers}-{host}"
        directory = OutputDirectory(out, plan.id, plan.identity)
        events = list(convert(plan, checkpoint, directory, kernels, Limits(workers, host)))
        pieces.add(sum(isinstance(event, Moved) for event in events))
        assert runs.tree(out) == expected
    assert min(pieces) < 7 < max(pieces)  # all experts of a parameter, or the largest one by one


@pytest.mark.parametrize(("kind", "flag"), [("modelopt", "--reconcile-scales"), ("gptoss", "")])
def test_experts_that_need_verbs_of_their_own(tmp_path, kind, flag):
    """NVFP4 with differing global scales: each expert has its own table."""
    Model(kind, experts=5, layers=1).write(tmp_path / "source")

    def converted(name: str, *options: str) -> Path:
        command = ["marlin-fp4", tmp_path / "source", "--out", tmp_path / name, "--device", "cpu"]
        runs.invoke(*command, *filter(None, (flag, *options)))
        out: Path = tmp_path / name
        return out

    expected = runs.tree(converted("all"))
    one = converted("one", "--max-host-memory", "300KB", "--workers", "1")
    assert runs.tree(one) == expected
    some = converted("some", "--max-host-memory", "2MB", "--workers", "3")
    assert runs.tree(some) == expected


def test_the_machine_decides_how_many_workers(monkeypatch):
    for cores, workers in ((1, 2), (2, 2), (5, 2), (16, 8), (200, 16)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert default_workers() == workers
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert default_workers() == 12  # half of 200 cores, for eight ranks
    assert Limits(2).slots == 4
