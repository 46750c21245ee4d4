"""What cannot be right is refused in a line, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moeconv.cli import app
from moeconv.errors import MoeconvError, SourceError, UnsupportedError
from tests import runs
from tests.fp4.models import KINDS, PROJECTIONS, Model

if TYPE_CHECKING:
    from tests.sources import Tensor

    Tensors = dict[str, Tensor]

SMALL: dict[str, Any] = {"layers": 1, "experts": 2, "hidden": 128, "intermediate": 128}
ONE = "model.layers.0.mlp.experts"


def refused(
    model: Model,
    root: Path,
    *options: str,
    change: Callable[[Tensors], None] | None = None,
    command: str = "marlin-fp4",
) -> MoeconvError:
    """Convert, and return the error; its words are one line and nothing was written."""
    source, out = model.write(root / "source", change), root / "out"
    before = runs.tree(root)
    with pytest.raises(MoeconvError) as caught:
        runs.invoke(command, source, "--out", out, "--device", "cpu", *options)
    assert runs.tree(root) == before
    assert "\n" not in f"{caught.value}{caught.value.hint}"
    return caught.value


def without(*endings: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(endings)]:
            del tensors[name]

    return change


def rescaled(shape: Callable[[tuple[int, ...]], tuple[int, ...]], *endings: str):
    def change(tensors: Tensors) -> None:
        for name, (dtype, old, _) in list(tensors.items()):
            if name.endswith(endings):
                new = shape(old)
                width = 4 if dtype == "F32" else 1
                tensors[name] = (dtype, new, bytes(int(np.prod(new)) * width))

    return change


# Scales.


@pytest.mark.parametrize("kind", ["modelopt", "ct", "mxfp4", "deepseek", "ct-mxfp4"])
@pytest.mark.parametrize(
    "shape",
    [lambda s: s[::-1], lambda s: (s[0], s[1] + 1), lambda s: s[:1]],
    ids=["T", "+1", "1-D"],
)
def test_block_scales_of_a_wrong_shape(kind: str, shape: Any, tmp_path: Path) -> None:
    ending = "w2.scale" if kind == "deepseek" else "down_proj.weight_scale"
    model = replace(Model(kind, **SMALL), hidden=256)
    error = refused(model, tmp_path, change=rescaled(shape, ending))
    assert isinstance(error, SourceError)
    assert f"{ending}` is " in str(error)
    assert "expected [256, " in str(error)


@pytest.mark.parametrize("group", [8, 32, 64, 128])
def test_nvfp4_groups_are_of_16(group: int, tmp_path: Path) -> None:
    change = rescaled(lambda s: (s[0], s[1] * 16 // group), "weight_scale")
    error = refused(Model("modelopt", **SMALL), tmp_path, change=change)
    assert "expected [128, 8] for gate's weight_scale" in str(error)


@pytest.mark.parametrize("group", [16, 64])
def test_mxfp4_groups_are_of_32(group: int, tmp_path: Path) -> None:
    change = rescaled(lambda s: (*s[:-1], s[-1] * 32 // group), "_scale", "_scales")
    for kind in ("mxfp4", "gptoss"):
        error = refused(Model(kind, **SMALL), tmp_path / kind, change=change)
        assert "expected [" in str(error)


def test_one_expert_s_scales_of_another_shape(tmp_path: Path) -> None:
    change = rescaled(lambda s: (s[0], s[1] // 2), "1.up_proj.weight_scale")
    error = refused(Model("modelopt", **SMALL), tmp_path, change=change)
    assert "`model.layers.0.mlp.experts.1.up_proj.weight_scale` is F8_E4M3 [128, 4], but" in str(
        error
    )


@pytest.mark.parametrize(
    ("kind", "ending"), [("modelopt", "weight_scale_2"), ("ct", "weight_global_scale")]
)
def test_missing_global_scales(kind: str, ending: str, tmp_path: Path) -> None:
    model = Model(kind, **SMALL)
    error = refused(model, tmp_path / "one", change=without(f"1.up_proj.{ending}"))
    assert isinstance(error, SourceError)
    assert f"`{ONE}.1.up_proj.{ending}` is missing" in str(error)
    for endings in ((ending,), (f"gate_proj.{ending}",)):
        error = refused(model, tmp_path / "-".join(endings), change=without(*endings))
        assert "stored in no scheme that is known" in str(error)


@pytest.mark.parametrize("kind", ["modelopt", "mxfp4", "ct-mxfp4"])
def test_missing_block_scales(kind: str, tmp_path: Path) -> None:
    error = refused(Model(kind, **SMALL), tmp_path, change=without("0.down_proj.weight_scale"))
    assert f"`{ONE}.0.down_proj.weight_scale` is missing" in str(error)


def test_more_than_one_global_scale_a_matrix(tmp_path: Path) -> None:
    change = rescaled(lambda _: (2,), "weight_scale_2")
    error = refused(Model("modelopt", **SMALL), tmp_path, change=change)
    assert "weight_scale_2` is F32 [2]: expected [1, 1]" in str(error)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_global_scale_may_have_any_axes_of_one(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = Model("modelopt", **SMALL)

    def reshape(tensors: Tensors) -> None:
        for name, (dtype, _, data) in list(tensors.items()):
            if name.endswith("weight_scale_2"):
                tensors[name] = (dtype, shape, data)

    outs = [tmp_path / "out", tmp_path / "other-out"]
    for out, change in zip(outs, (None, reshape), strict=True):
        source = model.write(tmp_path / f"source-{out.name}", change)
        runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
    assert runs.rank_bytes(outs[0]) == runs.rank_bytes(outs[1])


# Sizes.


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        ("modelopt", {"hidden": 96}, "hidden size must be a multiple of 64, found 96"),
        ("ct", {"hidden": 160}, "hidden size must be a multiple of 64, found 160"),
        ("ct-mxfp4", {"hidden": 96}, "hidden size must be a multiple of 64, found 96"),
        ("ct-mxfp4", {"intermediate": 96}, "share of the intermediate size, 96, is no multiple"),
        ("modelopt", {"experts": 0}, "there are no routed experts"),
        ("modelopt", {"hidden": 0}, "are empty: 2 experts, hidden 0, intermediate 128"),
        ("mxfp4", {"intermediate": 0}, "are empty: 2 experts, hidden 128, intermediate 0"),
        ("gptoss", {"intermediate": 0}, "are empty: 2 experts"),
    ],
    ids=str,
)
def test_sizes(kind: str, sizes: dict[str, int], words: str, tmp_path: Path) -> None:
    assert words in str(refused(Model(kind, **{**SMALL, **sizes}), tmp_path))


@pytest.mark.parametrize(("said", "words"), [(2, "expected 2 experts first"), (0, "are empty: 0")])
def test_stacks_of_no_experts(said: int, words: str, tmp_path: Path) -> None:
    change = rescaled(lambda s: (0, *s[1:]), "_blocks", "_scales", "_bias")
    model = Model("gptoss", **SMALL, config={"num_local_experts": said})
    assert words in str(refused(model, tmp_path, change=change))


@pytest.mark.parametrize(
    ("tp", "words"),
    [
        ("3", "does not divide by 3"),
        ("16", "a rank's share of the intermediate size, 8, is no multiple of 16"),
        ("1000000007", "does not divide by"),
    ],
)
def test_tp_sizes_that_the_engine_cannot_take(tp: str, words: str, tmp_path: Path) -> None:
    assert words in str(refused(Model("modelopt", **SMALL), tmp_path, "--tp", tp))


def test_no_layer_of_the_range(tmp_path: Path) -> None:
    error = refused(Model("modelopt", **SMALL), tmp_path, "--layers", "7-9")
    assert "`--layers 7-9` holds no layer with experts" in str(error)


# Flags.


@pytest.mark.parametrize("kind", KINDS)
def test_the_flag_for_the_other_scheme(kind: str, tmp_path: Path) -> None:
    model = Model(kind, **SMALL)
    wrong, right = ("--mxfp4", "--nvfp4") if model.is_nvfp4 else ("--nvfp4", "--mxfp4")
    error = refused(model, tmp_path, wrong)
    assert f"`{wrong}` was asked for, but the experts are stored as " in str(error)
    source, out = tmp_path / "source", tmp_path / "out"
    runs.invoke("marlin-fp4", right, source, "--out", out, "--device", "cpu")


def test_both_flags(tmp_path: Path) -> None:
    source = Model("modelopt", **SMALL).write(tmp_path / "source")
    result = CliRunner().invoke(app, ["marlin-fp4", "--nvfp4", "--mxfp4", str(source)])
    assert result.exit_code == 2
    assert "one of --nvfp4 and --mxfp4" in result.output


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "mxfp4" in kind or kind == "gptoss"])
@pytest.mark.parametrize("by", ["flag", "config"])
def test_mxfp4_is_not_served_in_float16(kind: str, by: str, tmp_path: Path) -> None:
    config = {"torch_dtype": "float16"} if by == "config" else {}
    options = ("--serving-dtype", "float16") if by == "flag" else ()
    error = refused(Model(kind, **SMALL, config=config), tmp_path, *options)
    assert isinstance(error, UnsupportedError)
    assert "214 of the 256 scale bytes; serve in bfloat16" in str(error)


@pytest.mark.parametrize("kind", ["mxfp4", "ct-mxfp4", "deepseek"])
def test_sglang_takes_no_mxfp4_but_gpt_oss(kind: str, tmp_path: Path) -> None:
    error = refused(Model(kind, **SMALL), tmp_path, "--engine", "sglang")
    assert "no Marlin layout of sglang takes " in str(error)
    assert "--engine vllm" in str(error.hint)


@pytest.mark.parametrize("dtype", ["float32", "auto", "torch.bfloat16", 16, ["bfloat16"]], ids=str)
@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_a_config_with_another_serving_dtype(key: str, dtype: object, tmp_path: Path) -> None:
    model = Model("modelopt", **SMALL, config={"torch_dtype": None, key: dtype})
    error = refused(model, tmp_path)
    assert f"the serving dtype is {dtype}, but Marlin serves in bfloat16 or float16" in str(error)
    runs.invoke(
        "marlin-fp4",
        tmp_path / "source",
        *("--out", tmp_path / "out", "--device", "cpu", "--serving-dtype", "bfloat16"),
    )


def test_a_config_without_a_dtype_is_bfloat16(tmp_path: Path) -> None:
    source = Model("mxfp4", **SMALL, config={"torch_dtype": None}).write(tmp_path / "source")
    shown = runs.invoke("marlin-fp4", source, "--dry-run", "--device", "cpu")
    assert "marlin-mxfp4 for bfloat16" in shown


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("it is there")
    error = refused(Model("modelopt", **SMALL), tmp_path, "--device", "cuda")
    assert "there is no device `cuda:0`" in str(error)


# Schemes.


def gpt_oss_names(*, apart: bool) -> Callable[[Tensors], None]:
    """Store gpt-oss's parts as another family would: contiguous halves, or an expert a tensor."""
    model = Model("gptoss", **SMALL)

    def change(tensors: Tensors) -> None:
        matrices = [[model.matrix(0, e, p) for p in PROJECTIONS] for e in range(model.experts)]
        if apart:
            for name in [name for name in tensors if "experts" in name]:
                del tensors[name]
            for e, expert in enumerate(matrices):
                for name, m in zip(PROJECTIONS, expert, strict=True):
                    stem, rows = f"{ONE}.{e}.{name}_proj", len(m.codes)
                    tensors[f"{stem}_blocks"] = ("U8", m.packed.shape, m.packed.tobytes())
                    tensors[f"{stem}_scales"] = ("U8", m.scales.shape, m.scales.tobytes())
                    tensors[f"{stem}_bias"] = ("BF16", (rows,), bytes(2 * rows))
            return
        for part, word in (("packed", "blocks"), ("scales", "scales")):
            data = b"".join(
                getattr(m, part).tobytes() for gate, up, _ in matrices for m in (gate, up)
            )
            dtype, shape, _ = tensors[f"{ONE}.gate_up_proj_{word}"]
            tensors[f"{ONE}.gate_up_proj_{word}"] = (dtype, shape, data)

    return change


@pytest.mark.parametrize("apart", [False, True])
def test_the_order_comes_from_the_family_and_never_from_the_shape(
    apart: bool, tmp_path: Path
) -> None:
    """vLLM's gpt-oss keeps pairs: halves of the same shape under another family's names cannot."""
    names = {"model_type": "qwen3_moe", "num_experts": 2, "moe_intermediate_size": 128}
    model = Model("gptoss", **SMALL, config=names)
    error = refused(model, tmp_path, change=gpt_oss_names(apart=apart))
    assert "keeps gate and up in pairs, and these are stored as halves" in str(error)

    # SGLang takes pairs apart: here halves and pairs become the same bytes.
    outs = tmp_path / "halves", tmp_path / "pairs"
    theirs = Model("gptoss", **SMALL).write(tmp_path / "gpt-oss")
    for source, out in zip((tmp_path / "source", theirs), outs, strict=True):
        options = ("--engine", "sglang", "--out", out, "--device", "cpu")
        runs.invoke("marlin-fp4", source, *options)
    halves, pairs = (runs.rank_bytes(out) for out in outs)
    weights = {key for key in pairs if "bias" not in key[1]}
    assert {key: halves[key] for key in weights} == {key: pairs[key] for key in weights}


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("modelopt", "1.down_proj.bias"),
        ("modelopt", "0.gate_proj.k_scale"),
        ("ct", "0.gate_proj.weight_zero_point"),
        ("mxfp4", "0.up_proj.weight_scale_inv"),
        ("gptoss", "down_proj_extra"),
        ("gptoss", "gate_up_proj_weight"),
    ],
)
def test_a_part_that_no_scheme_has(kind: str, extra: str, tmp_path: Path) -> None:
    model = Model(kind, **SMALL, extra={f"{ONE}.{extra}": ("F32", (1,), bytes(4))})
    error = refused(model, tmp_path)
    assert "stored in no scheme that is known" in str(error)
    assert f"`{extra}` F32" in str(error)


def test_gpt_oss_without_biases(tmp_path: Path) -> None:
    error = refused(Model("gptoss", **SMALL), tmp_path, change=without("_bias"))
    assert "stored in no scheme that is known" in str(error)


def test_a_projection_of_another_scheme(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        without("down_proj.weight_scale", "down_proj.weight_scale_2", "down_proj.input_scale")(
            tensors
        )
        for name, (_, shape, _) in list(tensors.items()):
            if name.endswith("down_proj.weight"):
                rows, cols = shape
                tensors[name] = ("BF16", (rows, 2 * cols), bytes(4 * rows * cols))

    error = refused(Model("modelopt", **SMALL), tmp_path, change=change)
    assert "stored in no scheme that is known" in str(error)


def test_two_fp4_schemes_in_one_checkpoint(tmp_path: Path) -> None:
    sizes = {**SMALL, "layers": 2}
    other = Model("mxfp4", **sizes).tensors()

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]
        tensors.update({name: value for name, value in other.items() if "layers.1." in name})

    error = refused(Model("modelopt", **sizes), tmp_path, change=change)
    assert "`model.layers.1.mlp.experts` are stored as mxfp4" in str(error)


def test_trtllm_names_the_command_for_fp4(tmp_path: Path) -> None:
    error = refused(Model("modelopt", **SMALL), tmp_path, command="trtllm")
    assert error.hint == "`moeconv marlin-fp4` takes these"


def test_no_fp4_experts_at_all(tmp_path: Path) -> None:
    error = refused(Model("modelopt", **SMALL, bf16_layers=(0,)), tmp_path)
    assert "there are no FP4 experts: they are stored as bf16" in str(error)
    assert error.hint == "`moeconv trtllm` takes BF16 experts"


def test_a_converted_directory_is_not_converted_again(tmp_path: Path) -> None:
    source, out = Model("modelopt", **SMALL).write(tmp_path / "source"), tmp_path / "out"
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
    before = runs.tree(out)
    with pytest.raises(UnsupportedError, match="already converted"):
        runs.invoke("marlin-fp4", out, "--out", tmp_path / "twice", "--device", "cpu")
    assert runs.tree(out) == before
    assert not (tmp_path / "twice").exists()


def test_a_file_that_would_serve_no_size(tmp_path: Path) -> None:
    """SGLang pads no gated NVFP4 expert: 96 is no multiple of 64 at any size."""
    model = Model("modelopt", **{**SMALL, "intermediate": 96})
    error = refused(model, tmp_path, "--engine", "sglang")
    assert "a rank's share of the intermediate size, 96, is no multiple of 64" in str(error)


def test_a_layout_by_name_that_is_for_other_experts(tmp_path: Path) -> None:
    model = Model("modelopt", **SMALL)
    error = refused(model, tmp_path, "--layout", "marlin-mxfp4", command="convert")
    assert "`marlin-mxfp4` was asked for, but these experts are for marlin-nvfp4" in str(error)


def test_the_hint_for_another_tp_size_makes_it_for_the_same_engine(tmp_path: Path) -> None:
    sizes = SMALL | {"intermediate": 192}
    source, out = Model("gptoss", **sizes).write(tmp_path / "source"), tmp_path / "out"
    runs.invoke("marlin-fp4", source, "--engine", "sglang", "--out", out, "--device", "cpu")
    with pytest.raises(UnsupportedError) as caught:
        runs.invoke("rank", out, "--tp", "2")
    assert "moeconv marlin-fp4 --engine sglang " in str(caught.value.hint)
