"""What becomes of NVFP4 scales: factor, flush, and global scales that differ; all of it counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from moeconv.errors import SourceError, UnsupportedError
from moeconv.kernels.marlin import count_bytes
from moeconv.output.codec import read_manifest
from tests import runs
from tests.fp4 import decode
from tests.fp4.held import held, source_values
from tests.fp4.models import Model

if TYPE_CHECKING:
    from tests.fp4.models import Array

ONE = "model.layers.0.mlp.experts"
GATE, UP = 3.85e-5, 4.83e-5


def convert(model: Model, root: Path, *options: str) -> Path:
    source, out = root / "source", root / f"out{'-'.join(options)}"
    if not source.exists():
        model.write(source)
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu", *options)
    return out


def dry_run(source: Path, *options: str) -> dict[str, Any]:
    text = runs.invoke("marlin-fp4", source, "--dry-run", "--json", "--device", "cpu", *options)
    (line,) = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return dict(line)


@pytest.mark.parametrize("loops", ["numba", "numpy"])
def test_bytes_are_counted_an_expert_each(loops, monkeypatch):
    if loops == "numpy":
        monkeypatch.setattr("moeconv.kernels.marlin.compiled", lambda: None)
    experts = np.random.default_rng(0).integers(0, 200, (3, 37, 2001), np.uint8)
    counts = count_bytes(experts)
    assert counts.shape == (3, 256)
    for expert, count in zip(experts, counts, strict=True):
        np.testing.assert_array_equal(count, np.bincount(expert.reshape(-1), minlength=256))


def tiny_and_large(layer: int, expert: int, projection: str, scales: Array) -> None:
    """Expert 0's scales are below 2^-4; in layer 0 one scale of expert 1 is 448."""
    scales[...] = 8 + scales % 16
    if layer == 0 and expert == 1:
        scales[0, 0] = 0x7E


# 3: one factor over all experts of a layer.


def test_the_factor_is_the_layer_s(tmp_path: Path) -> None:
    out = convert(Model("modelopt", experts=2, change_scales=tiny_and_large), tmp_path)
    first, second = read_manifest(out).facts
    assert first.factors == (1.0, 1.0), "expert 1 has 448"
    assert second.factors == (2.0**12, 2.0**12), "448 is 0.93 * 2^13 of 2^-5 * 15/8"
    assert first.prefix == ONE


def test_every_expert_shares_the_factor(tmp_path: Path) -> None:
    def tiny(layer: int, expert: int, projection: str, scales: Array) -> None:
        scales[...] = 8 + scales % (8 if expert == 0 else 16)

    model = Model("modelopt", experts=2, layers=1, change_scales=tiny)
    read = held(model, convert(model, tmp_path))
    expected = np.float32(2.0**119 / 256 / 2**12)
    assert read.scales(0, "w13").tolist() == [expected, expected]
    assert read.scales(0, "w2").tolist() == [expected, expected]


def test_fp16_has_no_factor(tmp_path: Path) -> None:
    model = Model("modelopt", experts=2, change_scales=tiny_and_large)
    out = convert(model, tmp_path, "--serving-dtype", "float16")
    manifest = read_manifest(out)
    assert manifest.dtype == "float16"
    assert [fact.factors for fact in manifest.facts] == [(1.0, 1.0)] * 2
    assert set(held(model, out).scales(1, "w13")) == {np.float32(2.0**7 / 256)}


def test_the_serving_dtype_is_the_config_s(tmp_path: Path) -> None:
    model = Model("modelopt", layers=1, experts=1, config={"torch_dtype": "float16"})
    assert read_manifest(convert(model, tmp_path)).dtype == "float16"


# 4: flushed and negative scales.


def odd_scales(layer: int, expert: int, projection: str, scales: Array) -> None:
    """In layer 1: 2^-9 thrice, 448, a negative one and a NaN, in different projections."""
    if layer == 1 and expert == 2:
        match projection:
            case "gate":
                scales[0, :2] = 0x01, 0x7E
            case "up":
                scales[3, 3] = 0x80 | 0x38
                scales[3, 4] = 0x7F
            case "down":
                scales[5, 1] = scales[200, 15] = 0x01
                scales[6, 0] = 0x7E
            case _:
                pass


def test_lost_scales_are_counted_by_layer(tmp_path: Path) -> None:
    model = Model("modelopt", change_scales=odd_scales)
    facts = read_manifest(convert(model, tmp_path)).facts
    assert [(fact.flushed, fact.negative) for fact in facts] == [(0, 0), (3, 2)]
    assert {fact.scales for fact in facts} == {3 * 4 * 256 * 16}


def test_a_dry_run_counts_them_too(tmp_path: Path) -> None:
    source = Model("modelopt", change_scales=odd_scales).write(tmp_path / "source")
    plan = dry_run(source)
    assert plan["scales"]["flushed"] == 3
    assert plan["scales"]["negative"] == 2
    layer = plan["facts"][1]
    assert layer["prefix"] == "model.layers.1.mlp.experts"
    assert (layer["flushed"], layer["negative"], layer["factors"]) == (3, 2, [1.0, 1.0])
    shown = runs.invoke("marlin-fp4", source, "--dry-run", "--device", "cpu")
    assert "98304: 3 flushed to zero, 2 negative" in shown
    assert not (tmp_path / "out").exists()


def test_the_end_table_shows_them(tmp_path: Path) -> None:
    source = Model("modelopt", change_scales=odd_scales).write(tmp_path / "source")
    shown = runs.invoke("marlin-fp4", source, "--out", tmp_path / "out", "--device", "cpu")
    assert "3 flushed to zero, 2 negative" in shown
    assert "factors" in shown


def test_a_flushed_scale_is_zero_and_the_rest_is_right(tmp_path: Path) -> None:
    model = Model("modelopt", change_scales=odd_scales)
    read = held(model, convert(model, tmp_path))
    for name, found in read.values(1, 2).items():
        matrix = model.matrix(1, 2, name)
        lost = (matrix.scales == 1) | (matrix.scales >= 0x7F)
        matrix.scales[lost] = 0
        groups = np.repeat(lost, 16, axis=1)
        expected = source_values(model, matrix)
        np.testing.assert_array_equal(found[~groups], expected[~groups])
        assert not found[groups & (np.repeat(model.matrix(1, 2, name).scales, 16, 1) != 0x7F)].any()


def test_above_the_share_it_is_refused_unless_asked(tmp_path: Path) -> None:
    def many(layer: int, expert: int, projection: str, scales: Array) -> None:
        scales[:, 0] = 1  # 1 of 16

    model = Model("modelopt", layers=1, change_scales=many)
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    with pytest.raises(UnsupportedError, match=r"would lose 6\.25% .*\(3072 too small") as error:
        runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
    assert "--max-lost-scales" in str(error.value.hint)
    assert not out.exists(), "refused before anything is written"
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu", "--max-lost-scales", "6.25")
    assert read_manifest(out).facts[0].flushed == 3072


# 5: gate and up of one expert have different global scales.


def differing(**fields: Any) -> Model:
    scales = dict.fromkeys(((0, e, p) for e in range(4) for p in ("gate", "up")), GATE)
    return Model("modelopt", layers=1, scales={**scales, (0, 2, "up"): UP}, **fields)


def test_the_default_is_the_engine_s_way_with_a_warning(tmp_path: Path) -> None:
    model = differing()
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    shown = runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
    assert "warning: 1 experts have different global scales for gate and up" in shown
    assert "--reconcile-scales" in shown
    assert read_manifest(out).facts[0].differing == 1
    assert dry_run(source)["scales"]["differing"] == 1

    equal = differing()
    object.__setattr__(equal, "scales", dict.fromkeys(equal.scales, GATE))
    other = runs.rank_bytes(convert(equal, tmp_path / "equal"))
    assert runs.rank_bytes(out) == other, "up's own scale has no part in the engine's bytes"


@pytest.mark.parametrize(("kind", "tp"), [("modelopt", None), ("ct", None), ("modelopt", "2")])
def test_global_scales_that_are_none_are_counted(tmp_path: Path, kind: str, tp: str | None) -> None:
    odd = [float("nan"), float("inf"), 0.0, -GATE]
    scales = {(0, e, p): odd[e] for e in range(4) for p in ("gate", "up")}
    options = () if tp is None else ("--tp", tp)
    source = Model(kind, layers=1, scales=scales).write(tmp_path / "source")
    said = dry_run(source, *options)["scales"]
    assert (said["unsound"], said["differing"]) == (8, 0), "NaN and NaN are the same"
    out = tmp_path / "out"
    shown = runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu", *options)
    assert "warning: 8 global scales are NaN, infinite, zero or negative" in shown
    assert {fact.unsound for fact in read_manifest(out).facts} == {8}
    assert "8 are NaN, infinite, zero or negative" in runs.invoke("inspect", out)
    runs.invoke("verify", out, "--source", source, "--device", "cpu")


def test_sound_global_scales_are_not_counted(tmp_path: Path) -> None:
    source = differing().write(tmp_path / "source")
    assert dry_run(source)["scales"]["unsound"] == 0


@pytest.mark.parametrize("tp", ["2", "4"])
def test_a_file_for_one_tp_counts_an_expert_once(tmp_path: Path, tp: str) -> None:
    source = differing().write(tmp_path / "source")
    assert dry_run(source, "--tp", tp)["scales"]["differing"] == 1


def test_reconciling_takes_the_larger_and_rescales_the_other(tmp_path: Path) -> None:
    model = differing()
    out = convert(model, tmp_path, "--reconcile-scales")
    facts = read_manifest(out).facts[0]
    assert facts.differing == 1
    np.testing.assert_allclose(facts.ratios[2], (GATE / UP, 1.0))
    assert facts.ratios[1] == (1.0, 1.0)
    read = held(model, out)
    scales = read.scales(0, "w13")
    factor = facts.factors[0]
    assert scales[2] == np.float32(UP) * np.float32(2.0**119) / np.float32(factor)
    assert scales[1] == np.float32(GATE) * np.float32(2.0**119) / np.float32(factor)

    found = read.values(0, 2)
    np.testing.assert_array_equal(found["up"], source_values(model, model.matrix(0, 2, "up")))
    gate = model.matrix(0, 2, "gate")
    stored = decode.e4m3(gate.scales) * (float(np.float32(GATE)) / float(np.float32(UP)))
    rescaled = nearest_e4m3(stored)
    assert facts.flushed == ((rescaled > 0) & (rescaled < 2.0**-6)).sum() > 0
    rescaled[rescaled < 2.0**-6] = 0
    rounded = decode.dequantised(gate.codes, rescaled, float(np.float32(UP)))
    np.testing.assert_array_equal(found["gate"], rounded)


def nearest_e4m3(values: Array) -> Array:
    """Round to E4M3 by trying all of its values; ties to the even byte."""
    bytes_ = np.arange(0x7F, dtype=np.uint8)
    distance = np.abs(values[..., None] - decode.e4m3(bytes_))
    best = distance.argmin(axis=-1)
    tied = np.take_along_axis(distance, np.minimum(best + 1, 0x7E)[..., None], -1)[..., 0]
    is_up: Array = (tied == distance.min(axis=-1)) & (best % 2 == 1)
    rounded: Array = decode.e4m3(bytes_)[best + is_up]
    return rounded


def test_other_options_are_another_plan(tmp_path: Path) -> None:
    source, out = differing().write(tmp_path / "source"), tmp_path / "out"
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
    done = runs.moeconv("marlin-fp4", source, "--out", out, "--reconcile-scales")
    assert done.returncode == 5
    assert "global scales" in done.stderr


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5])
def test_what_has_no_larger_one_is_not_reconciled(tmp_path: Path, value: float) -> None:
    model = Model("modelopt", layers=1, experts=2, scales={(0, 1, "up"): value})
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    with pytest.raises(SourceError, match=r"experts\.1\.up_proj\.weight_scale_2` is "):
        runs.invoke("marlin-fp4", source, "--out", out, "--reconcile-scales", "--device", "cpu")
    assert not out.exists()


@pytest.mark.parametrize("kind", ["modelopt", "ct"])
def test_an_expert_of_zeros_is_reconciled_to_zeros(tmp_path: Path, kind: str) -> None:
    scales = dict.fromkeys(((0, 0, p) for p in ("gate", "up", "down")), 0.0)
    model = Model(kind, layers=1, experts=2, scales=scales)
    read = held(model, convert(model, tmp_path, "--reconcile-scales"))
    assert not any(value.any() for value in read.values(0, 0).values())
    assert all(value.any() for value in read.values(0, 1).values())


# 6: an input scale is missing, and no one reads it.


@pytest.mark.parametrize("kind", ["modelopt", "ct"])
def test_a_missing_input_scale_changes_nothing(tmp_path: Path, kind: str) -> None:
    word = "input_scale" if kind == "modelopt" else "input_global_scale"
    model = Model(kind, layers=1)
    whole = convert(model, tmp_path)

    def without_one(tensors: dict[str, Any]) -> None:
        del tensors[f"{ONE}.3.up_proj.{word}"]

    other = model.write(tmp_path / "other", without_one)
    none = Model(kind, layers=1, input_scales=False).write(tmp_path / "none")
    for source in (other, none):
        out = tmp_path / f"out-{source.name}"
        runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
        assert runs.rank_bytes(out) == runs.rank_bytes(whole)
        runs.invoke("verify", out, "--source", source)


def test_input_scales_are_left_out_and_said_so(tmp_path: Path) -> None:
    source = Model("modelopt", layers=1).write(tmp_path / "source")
    out = tmp_path / "out"
    shown = runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
    assert "12 input_scale tensors, which the kernel does not read" in shown
    manifest = read_manifest(out)
    assert manifest.left_out == {"input_scale": 12}
    assert not [entry.name for entry in manifest.weights if "input_scale" in entry.name]
    assert dry_run(source)["left_out"] == {"input_scale": 12}


# 7: ModelOpt and compressed-tensors.


def test_the_same_numbers_are_the_same_bytes(tmp_path: Path) -> None:
    """With powers of two, which a reciprocal keeps: all bytes; the golden cases have the others."""
    reads = [
        runs.rank_bytes(convert(Model(kind, layers=1), tmp_path / kind))
        for kind in ("modelopt", "ct")
    ]
    assert reads[0] == reads[1]


def test_a_reciprocal_is_taken_in_float32(tmp_path: Path) -> None:
    scales = {(0, e, p): 3.1e-5 * (e + 1) for e in range(4) for p in ("gate", "up", "down")}
    model = Model("ct", layers=1, scales=scales)
    read = held(model, convert(model, tmp_path))
    for expert, found in enumerate(read.scales(0, "w2")):
        stored = np.float32(1) / np.float32(scales[0, expert, "down"])
        assert found == (np.float32(1) / stored) * np.float32(2.0**119)
