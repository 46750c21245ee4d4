"""Filling memory: any device's, any size of staging, any number of threads give the same bytes."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeconv.errors import VerifyError
from moeconv.layouts.layout import Placement
from moeconv.output.manifest import TensorEntry
from moeconv.serving import filling, open_converted
from moeconv.serving import steps as order
from moeconv.serving.host import HostTarget
from moeconv.serving.rank import Rank, RankTensor
from moeconv.serving.runs import Run, runs, shape_of
from moeconv.tensors import TensorSpec
from tests import runs as drive

CASES = [(1, 0, 1, 0), (2, 0, 1, 0), (2, 1, 1, 0), (1, 0, 2, 1)]
"""TP size and rank, EP size and rank."""


class Memory:
    """Files that are one buffer, and what was read of it."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.ranges: list[tuple[int, int]] = []
        self.expected: list[tuple[int, int]] = []

    def read(self, file: str, begin: int, out: np.ndarray) -> None:
        view = memoryview(out).cast("B")
        self.ranges.append((begin, begin + len(view)))
        view[:] = self.data[begin : begin + len(view)].tobytes()

    def expect(self, file: str, begin: int, nbytes: int) -> None:
        self.expected.append((begin, begin + nbytes))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[RankTensor, int]:
    """A tensor of any placement, stored in any pieces; and how large the buffer must be."""
    rank = draw(st.integers(1, 3))
    stored = tuple(draw(st.integers(0 if i == 0 else 1, 4)) for i in range(rank))
    axes = tuple(draw(st.permutations(range(rank))))
    final = tuple(max(1, stored[axis] + draw(st.integers(0, 2))) for axis in axes)
    item = draw(st.sampled_from([1, 2, 6, 8, 32]))
    begin = draw(st.integers(0, 5))
    end = begin + math.prod(stored) * item
    each = end + draw(st.integers(0, 5))
    spec = TensorSpec("U8", (math.prod(final) * item,))
    place = Placement("w", spec, begin, end, stored, axes, final, item)
    total = draw(st.integers(1, 6))
    cuts = sorted(draw(st.sets(st.integers(1, total), max_size=2)) | {0, total})
    pieces, at = [], draw(st.integers(0, 9))
    for first, stop in itertools.pairwise(cuts):
        nbytes = (stop - first) * each
        pieces.append(
            TensorEntry("t", "p", "w", "U8", (), "f", at, at + nbytes, first, stop - 1, None, ())
        )
        at += nbytes + 3
    low = draw(st.integers(0, total - 1))
    experts = range(low, draw(st.integers(low + 1, total)))
    held = tuple(p for p in pieces if p.first < experts.stop and p.last >= experts.start)
    return RankTensor("p", 0, "w", spec.stacked(len(experts)), experts, place, held), at


def expected(tensor: RankTensor, data: np.ndarray) -> bytes:
    """What the words of `Placement` say."""
    place, out = tensor.placement, []
    for expert in tensor.experts:
        entry = next(p for p in tensor.pieces if p.first <= expert <= p.last)
        each = (entry.end - entry.begin) // (entry.last - entry.first + 1)
        begin = entry.begin + (expert - entry.first) * each
        raw = data[begin + place.begin : begin + place.end]
        source = raw.reshape(*place.stored, place.item_bytes)
        source = source.transpose(*place.axes, len(place.axes))
        final = np.zeros((*place.final, place.item_bytes), np.uint8)
        final[tuple(slice(size) for size in source.shape[:-1])] = source
        out.append(final.tobytes())
    return b"".join(out)


@given(tensors(), st.integers(1, 200), st.integers(1, 3), st.sampled_from([0, 50, 1 << 30]))
def test_any_placement_through_any_buffer(drawn, limit, threads, ahead):
    tensor, size = drawn
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    files = Memory(data)
    out = np.full(tensor.nbytes, 0xA5, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "STAGING_BYTES", limit * threads)
        patch.setattr(order, "AHEAD_BYTES", ahead)
        patch.setattr(filling, "_PAGE", 1)
        filling.fill(files, [(tensor, out)], threads, check=False)  # type: ignore[arg-type]
    assert out.tobytes() == expected(tensor, data)
    ranges = sorted(files.ranges)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))  # nothing twice
    assert sum(end - begin for begin, end in ranges) == tensor.read_bytes

    told = sorted(at for begin, end in files.expected for at in range(begin, end))
    assert told == [at for begin, end in ranges for at in range(begin, end)]  # each byte, once
    shape = shape_of(tensor)
    reads = list(runs(tensor, shape, limit))
    assert sum(run.nbytes for run in reads) == tensor.read_bytes
    assert all(run.nbytes <= max(limit, shape.row_bytes) for run in reads)


@given(tensors(), st.integers(1, 200), st.integers(0, 300))
def test_the_kernel_is_told_so_far_ahead(drawn, limit, ahead):
    tensor, _ = drawn
    target = HostTarget(tensor, shape_of(tensor), np.empty(tensor.nbytes, np.uint8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "AHEAD_BYTES", ahead)
        told: list[Run] = []
        done = 0
        for step in order.steps([target], limit):
            told += step.later
            assert step.run in told
            rest = tensor.read_bytes - done
            assert sum(run.nbytes for run in told) - done >= min(ahead, rest)
            done += step.run.nbytes
    assert len(told) == len(set(told))


def outs_of(view: Rank) -> dict[str, torch.Tensor]:
    """Memory for a rank, in the parameters' own dtypes, full of a byte that shows."""
    return {
        f"{tensor.prefix}.{tensor.param}": torch.full(
            (tensor.nbytes // 2,), 0xA5A5 - (1 << 16), dtype=torch.int16
        ).view(torch.bfloat16)
        for tensor in view.tensors()
    }


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_torch_and_numpy_memory_get_the_same_bytes(converted, case, threads):
    tp, tp_rank, ep, ep_rank = case
    numpy = drive.rank_bytes(converted, tp=tp, rank=tp_rank, ep=ep, ep_rank=ep_rank)
    with open_converted(converted) as directory:
        view = directory.rank(tp_size=tp, tp_rank=tp_rank, ep_size=ep, ep_rank=ep_rank)
        outs = outs_of(view)
        pairs = [(tensor, outs[f"{tensor.prefix}.{tensor.param}"]) for tensor in view.tensors()]
        view.read_all(reversed(pairs), threads=threads, check=True)
        read = {
            (tensor.layer, tensor.param): out.view(torch.uint8).numpy().tobytes()
            for tensor, out in pairs
        }
    assert read == numpy


@pytest.mark.gpu
@pytest.mark.parametrize("staging", [filling.STAGING_BYTES, 1 << 16], ids=["large", "small"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_gpu_memory_gets_the_same_bytes(converted, monkeypatch, case, threads, staging):
    monkeypatch.setattr(filling, "STAGING_BYTES", staging)
    tp, tp_rank, ep, ep_rank = case
    numpy = drive.rank_bytes(converted, tp=tp, rank=tp_rank, ep=ep, ep_rank=ep_rank)
    with open_converted(converted) as directory:
        view = directory.rank(tp_size=tp, tp_rank=tp_rank, ep_size=ep, ep_rank=ep_rank)
        outs = {name: out.cuda() for name, out in outs_of(view).items()}
        pairs = [(tensor, outs[f"{tensor.prefix}.{tensor.param}"]) for tensor in view.tensors()]
        view.read_all(pairs, threads=threads)
        read = {
            (tensor.layer, tensor.param): out.view(torch.uint8).cpu().numpy().tobytes()
            for tensor, out in pairs
        }
    assert read == numpy


def test_memory_of_another_size_is_refused_before_anything_is_read(converted):
    with open_converted(converted) as directory:
        view = directory.rank()
        tensor = view.tensors()[0]
        for out in (
            np.empty(tensor.nbytes - 1, np.uint8),
            np.empty(2 * tensor.nbytes, np.uint8)[::2],
            torch.empty(tensor.nbytes + 2, dtype=torch.uint8),
            torch.empty(2 * tensor.nbytes, dtype=torch.uint8)[::2],
        ):
            with pytest.raises(ValueError, match=f"takes {tensor.nbytes} contiguous bytes"):
                view.read_into(tensor, out)


def _may_only_be_read(nbytes: int) -> np.ndarray:
    out = np.empty(nbytes, np.uint8)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (bytes, "memory that may only be read"),
        (_may_only_be_read, "memory that may only be read"),
        (lambda nbytes: [0] * nbytes, "a list"),
        (lambda _: None, "a NoneType"),
        (lambda nbytes: np.empty(nbytes // 8, object), "Python's own objects"),
        (lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="meta"), "meta memory"),
        (lambda nbytes: torch.empty(nbytes, dtype=torch.uint8).to_sparse(), "torch.sparse_coo"),
        (lambda nbytes: torch.empty(1, dtype=torch.uint8).expand(nbytes), "memory with gaps"),
    ],
    ids=["bytes", "read only", "list", "none", "objects", "meta", "sparse", "expanded"],
)
def test_memory_that_cannot_be_filled_is_refused(
    converted: Path, make: Callable[[int], Any], found: str
):
    with open_converted(converted) as directory:
        view = directory.rank()
        tensor = view.tensors()[0]
        with pytest.raises(ValueError, match=f"to be filled, not {found}$"):
            view.read_into(tensor, make(tensor.nbytes))


def test_a_buffer_of_python_is_filled(converted):
    with open_converted(converted) as directory:
        view = directory.rank()
        tensor = view.tensors()[0]
        plain, array = bytearray(tensor.nbytes), np.empty(tensor.nbytes, np.uint8)
        buffer: Any = plain
        view.read_into(tensor, buffer)
        view.read_into(tensor, array)
        assert plain == array.tobytes()


@pytest.mark.parametrize("kind", [np.empty, torch.empty], ids=["numpy", "torch"])
def test_memory_of_two_tensors_must_not_overlap(converted: Path, kind: Callable[..., Any]):
    with open_converted(converted) as directory:
        view = directory.rank()
        tensors = view.tensors("model.layers.0.mlp.experts")
        both = kind(
            sum(t.nbytes for t in tensors), dtype=torch.uint8 if kind is torch.empty else "u1"
        )
        first, second = tensors
        beside = [(first, both[: first.nbytes]), (second, both[first.nbytes :])]
        view.read_all(beside)
        at = first.nbytes - 1
        beside[1] = second, both[at : at + second.nbytes]
        with pytest.raises(ValueError, match="are given memory that overlaps"):
            view.read_all(beside)


def test_every_tensor_of_a_module_exactly_once(converted):
    with open_converted(converted) as directory:
        view = directory.rank()
        tensors = view.tensors("model.layers.0.mlp.experts")
        pairs = [(tensor, np.empty(tensor.nbytes, np.uint8)) for tensor in tensors]
        view.read_all(pairs)  # one whole module is enough
        with pytest.raises(ValueError, match=r"w2_weight` is given 0 times, expected once"):
            view.read_all(pairs[:1])
        with pytest.raises(ValueError, match=r"w13_weight` is given 2 times, expected once"):
            view.read_all([pairs[0], *pairs])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_short_file_stops_all_threads(converted, threads):
    """Cut while it is being read: before that its size is compared."""
    shard = next((converted / "experts").iterdir())
    with open_converted(converted) as directory:
        view = directory.rank()
        pairs = [(tensor, np.empty(tensor.nbytes, np.uint8)) for tensor in view.tensors()]
        view.read_all(pairs)
        with shard.open("r+b") as file:
            file.truncate(shard.stat().st_size - 1)
        with pytest.raises(VerifyError, match="ended early"):
            view.read_all(pairs, threads=threads)


def test_a_flipped_bit_shows_where_it_is_asked_for(converted):
    shard = sorted((converted / "experts").iterdir())[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with open_converted(converted) as directory:
        view = directory.rank(tp_size=2)
        pairs = [(tensor, np.empty(tensor.nbytes, np.uint8)) for tensor in view.tensors()]
        view.read_all(pairs)
        with pytest.raises(VerifyError, match=r"expert 3 of `model\.layers\.1.* is damaged"):
            view.read_all(pairs, check=True)


def test_reading_needs_no_torch(converted: Path):
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
from moeconv.serving import open_converted
with open_converted(sys.argv[1]) as converted:
    view = converted.rank(tp_size=2, tp_rank=1)
    view.read_all([(t, np.empty(t.nbytes, np.uint8)) for t in view.tensors()])
"""
    done = subprocess.run([sys.executable, "-c", code, str(converted)], check=False)
    assert done.returncode == 0
