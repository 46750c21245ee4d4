"""A rank reads its own bytes, each once, or is refused with what to do."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from moeconv.errors import SourceError, UnsupportedError, VerifyError
from moeconv.kernels.reference import ReferenceKernels
from moeconv.layouts import TRTLLM_BF16
from moeconv.layouts.layout import Geometry
from moeconv.serving import open_converted
from tests import runs
from tests.runs import Wanted
from tests.sources import Tiny

STORAGES = ("per-expert", "stacked", "transposed", "plain")
SIZES: dict[str, Any] = {"experts": 4, "hidden": 128, "intermediate": 192, "layers": 1}


def logical(storage: str, expert: int) -> dict[str, np.ndarray]:
    """Gate, up and down of an expert, sliced from the source by hand."""
    tiny = Tiny(storage=storage, **SIZES)
    tensors, prefix = tiny.tensors(), tiny.prefix(0)

    def array(name: str) -> np.ndarray:
        _, shape, data = tensors[f"{prefix}.{name}"]
        return np.frombuffer(data, np.uint16).reshape(shape)

    if storage in {"per-expert", "plain"}:
        names = ("up", "down") if storage == "plain" else ("gate", "up", "down")
        return {name: array(f"{expert}.{name}_proj.weight") for name in names}
    gate_up, down = array("gate_up_proj")[expert], array("down_proj")[expert]
    if storage == "transposed":
        gate_up, down = gate_up.T, down.T
    return {"gate": gate_up[:192], "up": gate_up[192:], "down": down}


def matrices(data: bytes, geometry: Geometry, tp: int, rank: int, param: str) -> list[np.ndarray]:
    """Undo the engine's order with the reference kernels: a source matrix an expert."""
    cut = TRTLLM_BF16.rank_slice(geometry, tp, rank)
    output = next(o for o in TRTLLM_BF16.outputs(geometry, cut) if o.param == param)
    found = []
    for stored in np.frombuffer(bytearray(data), np.uint8).reshape(-1, output.spec.nbytes):
        back = np.empty(output.matrix.shape, np.uint8)
        ReferenceKernels().invert(output.verb, stored, back)
        found.append(back.view(np.uint16))
    return found


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("tp", "made_for"), [(1, None), (3, None), (2, 2)])
def test_a_rank_has_its_rows_and_zeros(make_checkpoint, tmp_path, storage, tp, made_for):
    """Also CASES 11: at I = 192 and TP 3 or 2 each share is padded to 128 with zeros."""
    source = make_checkpoint(storage=storage, **SIZES)
    out = runs.run(source, tmp_path / "out", Wanted(tp=made_for, max_shard_bytes=300_000))
    gated = storage != "plain"
    geometry = Geometry(4, 128, 192, gated)
    share = 192 // tp
    padded = -(-share // 128) * 128
    for rank in range(tp):
        read = runs.rank_bytes(out, tp=tp, rank=rank)
        mine = slice(share * rank, share * (rank + 1))
        w13 = matrices(read[0, "w13_weight"], geometry, tp, rank, "w13_weight")
        w2 = matrices(read[0, "w2_weight"], geometry, tp, rank, "w2_weight")
        for expert in range(4):
            source_rows = logical(storage, expert)
            halves = w13[expert].reshape(2 if gated else 1, padded, 128)
            for half, name in zip(halves, ("gate", "up") if gated else ("up",), strict=True):
                assert np.array_equal(half[:share], source_rows[name][mine])
                assert not half[share:].any()
            assert np.array_equal(w2[expert][:, :share], source_rows["down"][:, mine])
            assert not w2[expert][:, share:].any()


def test_384_at_tp_2_starts_at_192(make_checkpoint, tmp_path):
    """CASES 11, in the engine's own order: three K blocks of down, then one of zeros."""
    source = make_checkpoint(hidden=64, intermediate=384, experts=1, layers=1)
    out = runs.run(source, tmp_path / "out")
    read = runs.rank_bytes(out, tp=2, rank=1)
    blocks = np.frombuffer(read[0, "w2_weight"], np.uint16).reshape(4, 64, 64)
    tiny = Tiny(hidden=64, intermediate=384, experts=1, layers=1)
    _, shape, data = tiny.tensors()["model.layers.0.mlp.experts.0.down_proj.weight"]
    down = np.frombuffer(data, np.uint16).reshape(shape)
    for block in range(3):
        first = 192 + 64 * block
        assert np.array_equal(blocks[block, 0], down[0, first : first + 64])
        assert np.array_equal(blocks[block, 1], down[4, first : first + 64])
    assert not blocks[3].any()


def test_a_share_off_the_unit_is_refused_with_the_command(make_checkpoint, tmp_path):
    """CASES 11: I = 640 at TP 8 is 80 rows a rank."""
    source = make_checkpoint("model", hidden=64, intermediate=640, experts=1, layers=1)
    out = runs.run(source, tmp_path / "out")
    with open_converted(out) as directory:
        assert directory.manifest.stacks[0].tp_sizes == (1, 2)
        with pytest.raises(UnsupportedError, match=r"cannot serve TP 8.* 80") as error:
            directory.rank(tp_size=8, tp_rank=0)
        with pytest.raises(UnsupportedError, match=r"cannot serve TP 3") as hopeless:
            directory.rank(tp_size=3, tp_rank=0)
    assert "`moeconv trtllm model --tp 8`" in str(error.value.hint)
    assert "choose another TP size" in str(hopeless.value.hint)


@pytest.mark.parametrize("limit", [100_000, 250_000, 10**9])
@pytest.mark.parametrize("tp", [None, 2])
def test_pieces_make_no_difference(make_checkpoint, tmp_path, limit, tp):
    """Expert ranges cut anywhere give every TP and EP rank the same bytes."""
    source = make_checkpoint(experts=6)
    whole = runs.run(source, tmp_path / "whole")
    cut = runs.run(source, tmp_path / "cut", Wanted(max_shard_bytes=limit, tp=tp))
    size = tp or 1
    for rank in range(size):
        for ep in (1, 2, 3):
            for ep_rank in range(ep):
                view: dict[str, Any] = {"tp": size, "rank": rank, "ep": ep, "ep_rank": ep_rank}
                assert runs.rank_bytes(cut, **view) == runs.rank_bytes(whole, **view)


def test_ep_ranks_are_the_experts_in_turn(converted):
    whole = runs.rank_bytes(converted)
    parts = [runs.rank_bytes(converted, ep=4, ep_rank=rank) for rank in range(4)]
    assert {key: b"".join(part[key] for part in parts) for key in whole} == whole


def test_only_a_rank_s_own_bytes_are_read(converted):
    with open_converted(converted) as directory:
        whole = sum(tensor.read_bytes for tensor in directory.rank().tensors())
        for tp in (1, 2):
            views = [directory.rank(tp_size=tp, tp_rank=rank) for rank in range(tp)]
            read = sum(tensor.read_bytes for view in views for tensor in view.tensors())
            assert read == whole


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp_size": 2, "tp_rank": 2}, "no TP rank 2 of 2"),
        ({"tp_rank": -1}, "no TP rank -1 of 1"),
        ({"ep_size": 3}, "do not divide by EP 3"),
        ({"ep_size": 2, "ep_rank": 2}, "no EP rank 2 of 2"),
        ({"tp_size": 0}, "no TP rank 0 of 0"),
        ({"tp_size": 3}, "cannot serve TP 3"),
    ],
    ids=str,
)
def test_ranks_that_are_not_there(converted, sizes, words):
    with open_converted(converted) as directory, pytest.raises(UnsupportedError, match=words):
        directory.rank(**sizes)


def test_a_file_for_one_tp_serves_no_other(source, tmp_path):
    out = runs.run(source, tmp_path / "out", Wanted(tp=2))
    with (
        open_converted(out) as directory,
        pytest.raises(UnsupportedError, match="made for TP 2, not for 4") as error,
    ):
        directory.rank(tp_size=4)
    assert "`moeconv trtllm source --tp 4`" in str(error.value.hint)


def test_a_partial_conversion_is_refused_unless_asked(source, tmp_path):
    out = runs.run(source, tmp_path / "out", Wanted(layers=(1, 1)))
    with pytest.raises(UnsupportedError, match="only layers 1-1"):
        open_converted(out)
    assert {layer for layer, _ in runs.rank_bytes(out, partial=True)} == {1}


def test_a_half_finished_directory_is_refused(source, tmp_path):
    next(runs.events(source, tmp_path / "out"))
    with pytest.raises(SourceError, match="not in"):
        open_converted(tmp_path / "out")


def test_an_unknown_layout_is_refused(converted):
    path = converted / "moeconv.json"
    manifest = json.loads(path.read_text())
    manifest["layout"]["version"] = 99
    path.write_text(json.dumps(manifest))
    with pytest.raises(UnsupportedError, match="trtllm-bf16 version 99 is not known"):
        open_converted(converted)


def test_damage_is_found_where_it_is(converted):
    (shard,) = converted.glob("experts/*layers.1.*")
    data = bytearray(shard.read_bytes())
    data[4096 + 2 * 256 * 128 * 2 + 5] ^= 1  # w13 of the third expert
    shard.write_bytes(data)
    with pytest.raises(VerifyError, match=r"expert 2 of `model\.layers\.1\..*w13_weight"):
        runs.rank_bytes(converted)


def test_passed_tensors_are_in_files_of_their_own(converted):
    with open_converted(converted) as directory:
        (path,) = directory.weight_files()
    assert path.relative_to(converted).parts[0] == "weights"


def test_one_reused_buffer(converted):
    """CASES 17, the reader's side: the same memory for every tensor, stale bytes and all."""
    expected = runs.rank_bytes(converted, tp=2, rank=1)
    with open_converted(converted) as directory:
        view = directory.rank(tp_size=2, tp_rank=1)
        buffer = np.full(max(tensor.nbytes for tensor in view.tensors()), 0xFF, np.uint8)
        for tensor in view.tensors():
            view.read_into(tensor, buffer[: tensor.nbytes])
            assert buffer[: tensor.nbytes].tobytes() == expected[tensor.layer, tensor.param]


@pytest.mark.parametrize(("first", "last"), [(0, 10**12), (-(10**12), 3), (1, 3), (0, 2), (3, 0)])
def test_a_manifest_with_any_number_of_experts_is_refused_at_once(converted, first, last):
    """Found by fuzzing: a trillion experts were counted one by one."""
    path = converted / "moeconv.json"
    manifest = json.loads(path.read_text())
    manifest["tensors"].append({**manifest["tensors"][0], "first": first, "last": last})
    path.write_text(json.dumps(manifest))
    with open_converted(converted) as opened, pytest.raises(VerifyError, match="does not hold"):
        opened.rank()
