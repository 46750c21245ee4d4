"""A fault that a layout shares with its inverse undoes itself; those who do not share it see it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeconv.errors import VerifyError
from moeconv.kernels import rowmaps
from moeconv.kernels.cpu import CpuKernels
from moeconv.layouts import LAYOUTS
from moeconv.layouts.layout import Geometry, Output, Slice
from moeconv.layouts.marlin import scales as scale_bytes
from moeconv.layouts.marlin.layout import MarlinFp4
from moeconv.layouts.marlin.survey import ScaleRule
from moeconv.layouts.trtllm_bf16 import TrtllmBf16
from moeconv.layouts.verbs import GlobalScale, MarlinRows, MarlinWeight, RowBlocks
from moeconv.output.codec import decode, encode_sealed, read_manifest
from moeconv.output.manifest import Manifest
from moeconv.restoration.words import WORDS
from moeconv.verification.verify import Verified, verify
from tests import runs
from tests.fp4.models import Model
from tests.sources import Tiny, write_tiny

SMALL: dict[str, Any] = {"layers": 1, "experts": 4, "hidden": 128, "intermediate": 128}
KINDS = {
    "trtllm-bf16": ("per-expert", "plain"),
    "marlin-nvfp4": ("modelopt", "ct", "nemotron"),
    "marlin-nvfp4-sglang": ("modelopt", "ct", "nemotron"),
    "marlin-mxfp4": ("mxfp4", "deepseek"),
    "marlin-mxfp4-ct": ("ct-mxfp4",),
    "marlin-mxfp4-gptoss": ("gptoss",),
    "marlin-mxfp4-gptoss-sglang": ("gptoss",),
}
"""What each layout is made of: storages of BF16 models, kinds of FP4 ones."""

CELLS = [(layout, kind) for layout, kinds in KINDS.items() for kind in kinds]
PARAMS = [
    (layout.id, output.param)
    for layout in LAYOUTS
    for output in layout.outputs(Geometry(1, 128, 128, gated=True), Slice(0, 128))
]


def write(kind: str, root: Path) -> Path:
    if kind in KINDS["trtllm-bf16"]:
        return write_tiny(root, Tiny(storage=kind, **SMALL))
    scales = {(0, 1, "up"): 1 / 384, (0, 2, "gate"): 3.85e-5, (0, 3, "down"): 1 / 3}
    return Model(kind, **SMALL, scales=scales).write(root)


def converted(layout: str, source: Path, out: Path, *options: str) -> Path:
    runs.invoke("convert", source, "--layout", layout, "--out", out, "--device", "cpu", *options)
    return out


def verified(out: Path, source: Path) -> Verified:
    *_, result = verify(out, CpuKernels(), source=source)
    assert isinstance(result, Verified)
    return result


def need(layout: str) -> str:
    """Return by whose words a layout is checked, if they are installed."""
    if layout == "trtllm-bf16":
        pytest.importorskip("flashinfer", reason="flashinfer has wheels for Linux only")
    return WORDS[layout].by


def test_every_layout_has_words() -> None:
    assert set(WORDS) == {layout.id for layout in LAYOUTS} == set(KINDS)


@pytest.mark.parametrize(
    ("layout", "kind", "options"),
    [(*cell, ()) for cell in CELLS]
    + [(layout, kinds[0], ("--tp", "2")) for layout, kinds in KINDS.items()],
    ids="".join,
)
def test_a_sample_of_every_parameter_is_what_the_engine_makes(
    layout: str, kind: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    by, source = need(layout), write(kind, tmp_path / "source")
    out = converted(layout, source, tmp_path / "out", *options)
    result = verified(out, source)
    tensors = len(read_manifest(out).tensors)
    assert set(result.witnessed) == {by}
    assert 2 * tensors <= result.witnessed[by] <= 3 * tensors
    assert not result.unwitnessed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [(), ("--reconcile-scales",)], ids=["engine", "reconciled"])
@pytest.mark.parametrize("kind", ["modelopt", "ct"])
def test_scales_of_every_pattern_are_what_the_engine_makes(
    kind: str, options: tuple[str, ...], dtype: str, tmp_path: Path
) -> None:
    """Each byte that a block scale can be: subnormal, negative, NaN too; factors above 1."""

    def every(layer: int, expert: int, projection: str, scales: Any) -> None:
        scales.reshape(-1)[:256] = range(256)
        if layer:
            scales[...] = scales % 0x40

    sizes = {**SMALL, "layers": 2}
    scales = {(0, 1, "up"): 1 / 384, (0, 2, "gate"): 3.85e-5, (1, 1, "up"): 1 / 3}
    source = Model(kind, **sizes, scales=scales, change_scales=every).write(tmp_path / "source")
    args = ("--serving-dtype", dtype, "--max-lost-scales", "100", "--device", "cpu", *options)
    out = tmp_path / "out"
    runs.invoke("marlin-fp4", source, "--out", out, *args)
    result = verified(out, source)
    assert result.witnessed["plain torch"]
    assert not result.unwitnessed
    assert (read_manifest(out).facts[1].factors[0] > 1) == (dtype == "bfloat16")


def wrong(output: Output) -> Output:
    """Return an output with a fault that its inverse undoes."""
    match output.verb:
        case RowBlocks() as verb:
            return replace(output, verb=replace(verb, gated=not verb.gated))
        case MarlinWeight() as verb:
            return replace(output, verb=replace(verb, stored=not verb.stored))
        case MarlinRows() as verb:
            order = "wide" if verb.order == "bias" else "bias"
            return replace(output, verb=replace(verb, order=order))  # type: ignore[arg-type]
        case GlobalScale() as verb:
            return replace(output, verb=replace(verb, exponent=verb.exponent + 1))


def exchanged(output: Output) -> Output:
    """Return an output whose fused projections changed places."""
    names = output.matrix.projections[::-1]
    return replace(output, matrix=replace(output.matrix, projections=names))


def inject(monkeypatch: pytest.MonkeyPatch, param: str, fault: Any) -> None:
    """Put a fault into the recipe of every layout that has the parameter."""
    for kind in (MarlinFp4, TrtllmBf16):
        right: Any = kind.outputs

        def faulty(layout: Any, *args: Any, right: Any = right) -> tuple[Output, ...]:
            outputs = right(layout, *args)
            return tuple(fault(it) if it.param == param else it for it in outputs)

        monkeypatch.setattr(kind, "outputs", faulty)


@pytest.mark.parametrize(("layout", "param"), PARAMS)
def test_a_fault_in_the_recipe_of_a_parameter_is_seen(
    layout: str, param: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by, source = need(layout), write(KINDS[layout][0], tmp_path / "source")
    inject(monkeypatch, param, wrong)
    out = converted(layout, source, tmp_path / "out")
    words = rf"`.*\.{param}\.0-3` is not what {by} makes of its source: expert 0, byte \d+"
    with pytest.raises(VerifyError, match=words) as found:
        verified(out, source)
    assert "same fault" in (found.value.hint or "")


@pytest.mark.parametrize(
    ("layout", "param"),
    [(layout, param) for layout, param in PARAMS if "w13" in param and "mxfp4" not in layout],
)
def test_gate_and_up_exchanged_are_seen(
    layout: str, param: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by, source = need(layout), write(KINDS[layout][0], tmp_path / "source")
    inject(monkeypatch, param, exchanged)
    out = converted(layout, source, tmp_path / "out")
    with pytest.raises(VerifyError, match=rf"{param}\.0-3` is not what {by} makes"):
        verified(out, source)


@pytest.mark.slow
def test_every_fault_in_every_recipe_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record: Callable[[str, int, str], None],
) -> None:
    """Of every kind of source, and of the first for one TP size too."""
    seen = 0
    for layout, param in PARAMS:
        need(layout)
        first, *more = KINDS[layout]
        for kind, options in ((first, ()), (first, ("--tp", "2")), *((it, ()) for it in more)):
            seen += 1
            source = write(kind, tmp_path / f"{seen}")
            with monkeypatch.context() as patch:
                inject(patch, param, wrong)
                out = converted(layout, source, tmp_path / f"{seen}.out", *options)
                with pytest.raises(VerifyError, match=rf"{param}\..*makes of its source"):
                    verified(out, source)
    record("a fault in the recipe of a parameter, with its inverse", seen, "seen by --source")


@pytest.fixture
def exchange_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Exchange two rows of every shuffle, in the layout and so in its inverse."""
    right = rowmaps.shuffle_rows

    def wrong(rows: int) -> rowmaps.Index:
        index = right(rows)
        index[[0, 1]] = index[[1, 0]]
        return index

    maps = (rowmaps.block_index, rowmaps.inverse_block_index)
    for cached in maps:
        cached.cache_clear()
    monkeypatch.setattr(rowmaps, "shuffle_rows", wrong)
    yield
    for cached in maps:
        cached.cache_clear()


@pytest.mark.usefixtures("exchange_rows")
def test_a_fault_of_the_row_map_and_its_inverse_is_seen(source: Path, tmp_path: Path) -> None:
    need("trtllm-bf16")
    out = runs.run(source, tmp_path / "out")
    with pytest.raises(VerifyError, match="is not what FlashInfer makes of its source: expert 0"):
        verified(out, source)


def test_a_fault_in_the_table_of_scales_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two bytes of it exchanged: nothing is lost, and the inverse undoes it."""
    right = ScaleRule.recode

    def faulty(rule: ScaleRule, factor: float, ratio: float = 1.0) -> bytes:
        table = bytearray(right(rule, factor, ratio))
        table[0x40], table[0x41] = table[0x41], table[0x40]
        return bytes(table)

    monkeypatch.setattr(ScaleRule, "recode", faulty)
    source = write("modelopt", tmp_path / "source")
    out = converted("marlin-nvfp4", source, tmp_path / "out")
    with pytest.raises(VerifyError, match=r"w13_weight_scale\.0-3` is not what plain torch"):
        verified(out, source)


def low(_layer: int, _expert: int, _projection: str, scales: Any) -> None:
    """Block scales from which a power of two can be taken out."""
    scales[...] = scales % 0x40


def test_a_fault_in_a_layers_factor_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales and global scales agree on it, so that no expert alone shows it."""
    right = scale_bytes.factor
    monkeypatch.setattr(scale_bytes, "factor", lambda counts: right(counts) / 2)
    source = Model("modelopt", **SMALL, change_scales=low).write(tmp_path / "source")
    out = tmp_path / "out"
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu", "--max-lost-scales", "100")
    with pytest.raises(VerifyError, match=r"the factors \(128\.0, 128\.0\).*with \(64\.0, 64\.0\)"):
        verified(out, source)


def test_factors_that_were_taken_out_of_the_manifest_are_seen(tmp_path: Path) -> None:
    source = Model("modelopt", **SMALL, change_scales=low).write(tmp_path / "source")
    out = tmp_path / "out"
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu", "--max-lost-scales", "100")
    path = out / "moeconv.json"
    manifest = decode(path.read_bytes(), Manifest, "")
    path.write_bytes(encode_sealed(replace(manifest, facts=())))
    with pytest.raises(VerifyError):
        verified(out, source)


def test_without_flashinfer_it_says_that_nobody_checked(
    source: Path, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    result = verified(converted, source)
    assert not result.witnessed
    assert result.unwitnessed
    shown = " ".join(runs.invoke("verify", converted, "--source", source).split())
    assert re.search(rf"{result.unwitnessed} tensors? not checked by others", shown)
