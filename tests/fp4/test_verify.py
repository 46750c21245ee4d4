"""`verify` finds what is damaged in a FP4 directory, and says what no inverse gives back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from moeconv.errors import MoeconvError, VerifyError
from moeconv.output.codec import decode, encode_sealed, read_manifest
from moeconv.output.manifest import Manifest
from tests import runs
from tests.fp4.models import KINDS, Model

if TYPE_CHECKING:
    from tests.fp4.models import Array

SMALL: dict[str, Any] = {"layers": 1, "experts": 3, "hidden": 128, "intermediate": 128}
PARAMS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
GLOBALS = ("w13_weight_scale_2", "w2_weight_scale_2")
BIASES = ("w13_bias", "w2_bias")
CELLS = [
    (kind, param)
    for kind in KINDS
    for param in (
        *PARAMS,
        *(GLOBALS if kind in {"modelopt", "ct", "nemotron"} else ()),
        *(BIASES if kind == "gptoss" else ()),
    )
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Convert a kind, once a module."""
    root = tmp_path_factory.mktemp("fp4")

    def get(kind: str) -> tuple[Path, Path]:
        source, out = root / kind, root / f"{kind}-out"
        if not out.exists():
            Model(kind, **SMALL).write(source)
            runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
        return source, out

    return get


def checked(out: Path, *options: str | Path) -> dict[str, Any]:
    text = runs.invoke("verify", out, "--json", "--device", "cpu", *options)
    return dict(json.loads(text))


@pytest.mark.parametrize(("kind", "param"), CELLS)
def test_one_damaged_bit_is_found_with_the_source_and_without(
    kind: str, param: str, converted: Callable[[str], tuple[Path, Path]]
) -> None:
    source, out = converted(kind)
    entry = next(entry for entry in read_manifest(out).tensors if entry.param == param)
    path = out / entry.file
    sound = path.read_bytes()
    # A byte of the last expert, in the middle: never of the padding.
    size = (entry.end - entry.begin) // 3
    at = entry.begin + 2 * size + (size // 4 if "bias" not in param else 2)
    try:
        for bit in (0x01, 0x80):
            damaged = bytearray(sound)
            damaged[at] ^= bit
            path.write_bytes(damaged)
            checked(out)  # the structure is still right
            with pytest.raises(VerifyError, match=rf"expert 2 of `.*{param}.*is damaged"):
                checked(out, "--read-data")
            with pytest.raises(VerifyError, match=rf"`.*{param}\.0-2` (does not|is not what)"):
                checked(out, "--source", source)
    finally:
        path.write_bytes(sound)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_of_the_source_is_found(
    kind: str, converted: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, out = converted(kind)

    def flip(tensors: dict[str, Any]) -> None:
        endings = ("_blocks", "1.down_proj.weight", "1.down_proj.weight_packed", "1.w2.weight")
        name = next(name for name in tensors if name.endswith(endings))
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, bytes([data[0] ^ 1]) + data[1:])

    source = Model(kind, **SMALL).write(tmp_path / "source", flip)
    with pytest.raises(VerifyError, match=r"does not give back .*row 0, byte 0: expected"):
        checked(out, "--source", source)


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_back_is_lossless(
    kind: str, converted: Callable[[str], tuple[Path, Path]]
) -> None:
    """Normal scales, equal global scales that are powers of two: every byte comes back."""
    source, out = converted(kind)
    result = checked(out, "--read-data", "--source", source)
    assert result["lost"] == {}
    inputs = (
        0 if kind in {"mxfp4", "ct-mxfp4", "deepseek", "gptoss"} else 3 * (2 + (kind != "nemotron"))
    )
    assert sum(result["left_out"].values()) == inputs
    every = Model(kind, **SMALL).tensors()
    assert result["sources"] == len(every) - inputs, "each source tensor is compared or left out"


def lossy(layer: int, expert: int, projection: str, scales: Array) -> None:
    if expert == 1 and projection == "up":
        scales[0, :4] = 0x01, 0x81, 0xB8, 0x7F


@pytest.mark.parametrize("tp", [None, "2"])
def test_lost_bytes_are_counted_and_named(tmp_path: Path, tp: str | None) -> None:
    model = Model("modelopt", **SMALL, change_scales=lossy, scales={(0, 2, "up"): 1 / 512})
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    made_for = ("--tp", tp) if tp else ()
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu", *made_for)
    result = checked(out, "--source", source)
    # 0x01, 0x81 and 0xB8 become zero; 0x7F and 0xFF are one NaN, of which the lower stands.
    # Up's own global scale is half of gate's, one byte apart; each rank has it.
    assert result["lost"] == {"weight_scale": 3, "global_scale": int(tp or 1)}
    shown = runs.invoke("verify", out, "--source", source, "--device", "cpu")
    assert "lost of weight_scale" in shown
    assert "lost of global_scale" in shown
    assert "9 input_scale tensors, which the kernel does not read" in shown
    assert "lossless" not in shown


def test_reciprocals_that_do_not_come_back_are_counted(tmp_path: Path) -> None:
    stored = np.random.default_rng(0).uniform(1e3, 1e5, 64).astype(np.float32)

    def reciprocals(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith("weight_global_scale"):
                expert = int(name.split(".")[-3])
                tensors[name] = ("F32", (1,), stored[expert].tobytes())

    sizes = {**SMALL, "hidden": 64, "intermediate": 64, "experts": 64}
    source = Model("ct", **sizes).write(tmp_path / "source", reciprocals)
    out = tmp_path / "out"
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
    back = np.float32(1) / (np.float32(1) / stored)
    bytes_ = int((stored.view(np.uint8) != back.view(np.uint8)).sum())
    assert bytes_ > 0
    assert checked(out, "--source", source)["lost"] == {"global_scale": 3 * bytes_}


def test_sglang_s_rounded_global_scales_are_counted(tmp_path: Path) -> None:
    model = Model("modelopt", **SMALL, scales={(0, 0, "down"): 1 / 3})
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu", "--engine", "sglang")
    assert checked(out, "--source", source)["lost"] == {"global_scale": 3}


def test_reconciled_scales_are_counted(tmp_path: Path) -> None:
    model = Model("modelopt", **SMALL, scales={(0, 0, "gate"): 3.85e-5, (0, 0, "up"): 4.83e-5})
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu", "--reconcile-scales")
    lost = checked(out, "--source", source)["lost"]
    assert 0 < lost["weight_scale"] < 128 * 8
    assert 0 < lost["global_scale"] <= 4


def test_another_source_of_the_same_shape_is_found(
    converted: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, out = converted("modelopt")
    other = Model("modelopt", **SMALL, scales={(0, 1, "down"): 1 / 128}).write(tmp_path / "other")
    with pytest.raises(VerifyError, match=r"w2_weight_scale_2\.0-2` is not what its source gives"):
        checked(out, "--source", other)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["facts"][0].update(factors=[2.0, 1.0]), "is not what its source gives"),
        (lambda m: m.update(dtype="float16"), "is not what its source gives"),
        (lambda m: m.update(dtype="float8"), "is not known to this moeconv"),
        (lambda m: m["plan"].pop("global scales"), "does not say `global scales`"),
        (lambda m: m["layout"].update(id="marlin-mxfp4"), "are stored as modelopt-nvfp4"),
        (lambda m: m["layout"].update(tp=2), "is not what was converted"),
    ],
    ids=["factor", "fp16", "fp8", "plan", "layout", "tp"],
)
def test_a_manifest_that_says_something_else(
    change: Callable[[dict[str, Any]], None],
    words: str,
    converted: Callable[[str], tuple[Path, Path]],
) -> None:
    source, out = converted("modelopt")
    path = out / "moeconv.json"
    sound = path.read_bytes()
    manifest = json.loads(sound)
    change(manifest)
    try:
        path.write_text(json.dumps(manifest))
        with pytest.raises(VerifyError, match="was changed after the conversion"):
            checked(out)
        path.write_bytes(encode_sealed(decode(path.read_bytes(), Manifest, "")))
        with pytest.raises(MoeconvError, match=words):
            checked(out, "--source", source)
    finally:
        path.write_bytes(sound)
