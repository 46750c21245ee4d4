"""The plan alone decides: who goes into which shard, and what its id covers."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.errors import UnsupportedError
from moeconv.planning.jobs import Converted
from moeconv.planning.plan import _ranges
from tests import runs
from tests.runs import Wanted

EXPERT_BYTES = 3 * 128 * 128 * 2


@given(count=st.integers(1, 300), size=st.integers(1, 50), limit=st.integers(1, 1000))
def test_ranges_hold_every_expert_once(count, size, limit):
    ranges = list(_ranges(count, size, limit))
    assert [expert for part in ranges for expert in part] == list(range(count))
    lengths = [len(part) for part in ranges]
    assert max(lengths) * size <= max(limit, size)
    assert len(set(lengths[:-1])) <= 1, "uneven"


def test_shards_keep_to_the_limit(make_checkpoint, tmp_path):
    """CASES 34: cut at expert ranges, whatever the layer; names say the range."""
    source = make_checkpoint(experts=7)
    out = runs.run(source, tmp_path / "out", Wanted(max_shard_bytes=3 * EXPERT_BYTES))
    shards = runs.shards(out)
    experts = sorted(name for name in shards if name.startswith("experts/model.layers.0."))
    assert [name.split(".")[-2] for name in experts] == ["0-2", "3-5", "6-6"]
    manifest = json.loads((out / "moeconv.json").read_text())
    prefix = "model.layers.1.mlp.experts"
    assert {entry["name"] for entry in manifest["tensors"] if entry["prefix"] == prefix} == {
        f"{prefix}.{param}.{part}"
        for param in ("w13_weight", "w2_weight")
        for part in ("0-2", "3-5", "6-6")
    }
    assert all(len(data) <= 3 * EXPERT_BYTES + 8192 for data in shards.values())


def test_a_range_is_named_also_when_it_is_all(source):
    plan, _ = runs.plan(source)
    names = [t.name for job in plan.jobs for t in job.tensors if isinstance(t, Converted)]
    assert names[:2] == [f"model.layers.0.mlp.experts.{p}_weight.0-3" for p in ("w13", "w2")]
    plan, _ = runs.plan(source, Wanted(tp=2))
    names = [t.name for job in plan.jobs for t in job.tensors if isinstance(t, Converted)]
    assert names[2] == "model.layers.0.mlp.experts.w13_weight.rank1.0-3"


@pytest.mark.parametrize("storage", ["per-expert", "stacked", "transposed"])
@pytest.mark.parametrize("tp", [None, 2])
def test_experts_side_by_side_are_read_as_each_by_itself(make_checkpoint, storage, tp):
    plan, _ = runs.plan(make_checkpoint(storage=storage), Wanted(tp=tp))
    converted = [t for job in plan.jobs for t in job.tensors if isinstance(t, Converted)]
    for tensor in converted:
        first, *_, last = tensor.experts
        lots = tensor.lots(range(first, last + 1))
        for i, expert in enumerate(range(first, last + 1)):
            places = tensor.places(expert)
            assert [list(lot.parts)[i] for lot in lots] == [place.part for place in places]
            assert [(lot.first.row, lot.begins[i]) for lot in lots] == [
                (place.row, place.part.span[0]) for place in places
            ]


@pytest.mark.parametrize("tp", [None, 2])
def test_every_tensor_has_one_place(source, tp):
    plan, checkpoint = runs.plan(source, Wanted(tp=tp, max_shard_bytes=100_000))
    names = [tensor.name for job in plan.jobs for tensor in job.tensors]
    assert len(set(names)) == len(names)
    assert len({job.file for job in plan.jobs}) == len(plan.jobs)
    passed = {name for name in names if name in checkpoint.tensors}
    converted = {name for stack in plan.stacks for name in stack.names}
    assert passed | converted == checkpoint.tensors.keys()
    assert not passed & converted


def test_the_id_covers_what_decides_the_bytes(make_checkpoint):
    source = make_checkpoint("one")
    same = runs.plan(source)[0].id
    others = {
        runs.plan(source, Wanted(tp=2))[0].id,
        runs.plan(source, Wanted(max_shard_bytes=10**6))[0].id,
        runs.plan(source, Wanted(layers=(0, 0)))[0].id,
        runs.plan(make_checkpoint("two", seed=1))[0].id,
        runs.plan(make_checkpoint("three", config={"rope_theta": 1}))[0].id,
    }
    assert len(others | {same}) == 6
    assert runs.plan(source)[0].id == same
    assert runs.plan(make_checkpoint("copy"))[0].id == same


def test_layers_are_a_part_of_the_experts_and_all_the_rest(make_checkpoint, tmp_path):
    source = make_checkpoint(layers=3)
    out = runs.run(source, tmp_path / "out", Wanted(layers=(1, 1)))
    manifest = json.loads((out / "moeconv.json").read_text())
    assert manifest["partial"] == "layers 1-1"
    assert [stack["layer"] for stack in manifest["stacks"]] == [1]


def test_a_shard_that_cannot_be_so_small_is_warned_of(source, tmp_path):
    out = runs.run(source, tmp_path / "out", Wanted(max_shard_bytes=1))
    sizes = [path.stat().st_size for path in out.rglob("*.safetensors")]
    least = max(path.stat().st_size for path in (out / "experts").iterdir())
    (warning,) = runs.plan(source, Wanted(max_shard_bytes=1))[0].warnings
    assert len(sizes) > 1
    assert re.match(r"(\d+) of \1 shards are larger than 1 bytes", warning)
    assert warning.endswith(f" {least} bytes is the least that holds each of them")
    (warning,) = runs.plan(source, Wanted(max_shard_bytes=least - 1))[0].warnings
    assert warning.startswith("8 of ")
    assert not runs.plan(source, Wanted(max_shard_bytes=least))[0].warnings
    for more in ((), ("--dry-run",)):
        shown = runs.invoke(
            "trtllm", source, "--out", tmp_path / "b", "--max-shard-size", "1", *more
        )
        assert f"{least} bytes is the least" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("fields", "wanted", "words"),
    [
        ({"hidden": 96}, Wanted(), "hidden size must be a multiple of 64, found 96"),
        ({}, Wanted(tp=3), r"128 does not divide by (`--tp )?3"),
        ({}, Wanted(layers=(5, 9)), "`--layers 5-9` holds no layer with experts"),
    ],
    ids=["hidden", "tp", "layers"],
)
def test_what_the_target_cannot_hold_is_refused(make_checkpoint, fields, wanted, words):
    with pytest.raises(UnsupportedError, match=words):
        runs.plan(make_checkpoint(**fields), wanted)
