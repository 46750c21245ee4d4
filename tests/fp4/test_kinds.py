"""Every kind of checkpoint and both commands; what passes through, and where each tensor went."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from moeconv.errors import UnsupportedError
from moeconv.output.codec import read_manifest
from tests import runs
from tests.fp4 import decode
from tests.fp4.held import held, source_values
from tests.fp4.models import KINDS, PROJECTIONS, Model
from tests.sources import Tiny, write_checkpoint, write_tiny

if TYPE_CHECKING:
    from tests.sources import Tensor

    Tensors = dict[str, Tensor]

SMALL: dict[str, Any] = {"layers": 1, "experts": 2, "hidden": 128, "intermediate": 128}
ONE = "model.layers.0.mlp.experts"


def convert(source: Path, out: Path, *options: str) -> Path:
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu", *options)
    return out


def weights(root: Path) -> dict[str, tuple[str, bytes]]:
    """Return dtype and bytes of every tensor that passed through."""
    manifest = read_manifest(root)
    return {
        entry.name: (entry.dtype, (root / entry.file).read_bytes()[entry.begin : entry.end])
        for entry in manifest.weights
    }


# 15: each kind of checkpoint and each command.


def mixtral(root: Path) -> Path:
    words = dict(zip(PROJECTIONS, ("w1", "w3", "w2"), strict=True))
    model = Model("modelopt", **SMALL, bf16_layers=(0,))
    tensors = {
        ".".join(words.get(part.removesuffix("_proj"), part) for part in name.split(".")).replace(
            "mlp.", "block_sparse_moe."
        ): tensor
        for name, tensor in model.tensors().items()
    }
    config = {
        "model_type": "mixtral",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_local_experts": 2,
    }
    return write_checkpoint(root, tensors, config)


def with_mtp(root: Path) -> Path:
    """DeepSeek-V4 with an MTP block whose experts are more."""
    main = Model("deepseek", **SMALL)
    block = Model("deepseek", **{**SMALL, "experts": 3}).tensors()
    extra = {name.replace("layers.0.", "mtp.0."): t for name, t in block.items() if "ffn" in name}
    object.__setattr__(main, "extra", extra)
    return main.write(root)


@dataclass(frozen=True)
class Fixture:
    """A checkpoint, and what each command makes of it: a layout, or words of the refusal."""

    write: Callable[[Path], Path]
    trtllm: str
    marlin: str


FIXTURES = {
    "A": Fixture(lambda root: write_tiny(root, Tiny()), "trtllm-bf16", "there are no FP4 experts"),
    "B": Fixture(
        lambda root: write_tiny(
            root, Tiny(storage="stacked", config={"model_type": "qwen3_5_moe"})
        ),
        "trtllm-bf16",
        "there are no FP4 experts",
    ),
    "C": Fixture(Model("modelopt").write, "takes bf16", "marlin-nvfp4"),
    "D": Fixture(Model("ct").write, "takes bf16", "marlin-nvfp4"),
    "E": Fixture(Model("gptoss").write, "takes bf16", "marlin-mxfp4-gptoss"),
    "F": Fixture(with_mtp, "takes bf16", "marlin-mxfp4"),
    "G": Fixture(
        lambda root: write_tiny(root, Tiny(storage="plain")),
        "trtllm-bf16",
        "there are no FP4 experts",
    ),
    "G in NVFP4": Fixture(Model("nemotron").write, "takes bf16", "marlin-nvfp4"),
    "H": Fixture(mixtral, "trtllm-bf16", "there are no FP4 experts"),
}


@pytest.mark.parametrize("command", ["trtllm", "marlin-fp4"])
@pytest.mark.parametrize("name", FIXTURES)
def test_each_kind_is_converted_or_refused_in_a_line(
    name: str, command: str, tmp_path: Path
) -> None:
    fixture = FIXTURES[name]
    source, out = fixture.write(tmp_path / "source"), tmp_path / "out"
    expected = fixture.trtllm if command == "trtllm" else fixture.marlin
    if " " in expected:
        with pytest.raises(UnsupportedError) as caught:
            runs.invoke(command, source, "--out", out, "--device", "cpu")
        assert expected in str(caught.value)
        assert "\n" not in f"{caught.value}{caught.value.hint}"
        assert not out.exists()
        return
    runs.invoke(command, source, "--out", out, "--device", "cpu")
    assert read_manifest(out).layout.id == expected
    runs.invoke("verify", out, "--read-data", "--source", source)


def test_it_works_as_it_stands(tmp_path: Path) -> None:
    """`moeconv marlin-fp4 --nvfp4 ckpt/`, a real process, no other word."""
    Model("modelopt", **SMALL).write(tmp_path / "ckpt")
    done = runs.moeconv("marlin-fp4", "--nvfp4", "ckpt/", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "ckpt-marlin-nvfp4" / "moeconv.json").exists()
    Model("gptoss", **SMALL).write(tmp_path / "oss")
    done = runs.moeconv("marlin-fp4", "oss", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "oss-marlin-mxfp4" / "moeconv.json").exists()


# 18: what is faster on Blackwell.


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_with_a_sentence_on_native_fp4(kind: str, tmp_path: Path) -> None:
    source = Model(kind, **SMALL).write(tmp_path / "source")
    shown = runs.invoke("marlin-fp4", source, "--out", tmp_path / "out", "--device", "cpu")
    assert "Blackwell GPUs have native FP4 kernels" in " ".join(shown.split())


# 10: experts without a gate.


def test_nemotron_has_one_projection_in_w13(tmp_path: Path) -> None:
    model = Model("nemotron", **SMALL)
    read = held(model, convert(model.write(tmp_path / "source"), tmp_path / "out"))
    codes = decode.weight_codes(read.expert(0, "w13_weight", 1), 128, 128)
    np.testing.assert_array_equal(codes, model.matrix(0, 1, "up").codes)
    assert len(read.scales(0, "w13")) == model.experts


# 8: gate and up where their family says they are.


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_gpt_oss_pairs_stay_pairs_under_vllm_and_become_halves_under_sglang(
    engine: str, tmp_path: Path
) -> None:
    model = Model("gptoss", **SMALL)
    out = convert(model.write(tmp_path / "source"), tmp_path / "out", "--engine", engine)
    read = held(model, out)
    codes = decode.weight_codes(read.expert(0, "w13_weight", 1), 256, 256)[:, :128]
    gate, up = (model.matrix(0, 1, name).codes for name in ("gate", "up"))
    found = (codes[0::2], codes[1::2]) if engine == "vllm" else (codes[:128], codes[128:])
    np.testing.assert_array_equal(found[0], gate)
    np.testing.assert_array_equal(found[1], up)

    word = "bias" if engine == "vllm" else "weight_bias"
    bias = decode.biases(read.expert(0, f"w13_{word}", 1))
    wanted = [model.bias(0, name)[1] for name in PROJECTIONS]
    found = (bias[0::2], bias[1::2]) if engine == "vllm" else (bias[:128], bias[128:])
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])
    down = decode.biases(read.expert(0, f"w2_{word}", 1))
    np.testing.assert_array_equal(down[:128], wanted[2])
    assert not down[128:].any()


# 12: a name that no family has.


def test_a_packed_suffix_that_no_family_maps(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if "experts.0.gate_proj" in name]:
            tensors[name.replace("gate_proj", "gate_packed")] = tensors.pop(name)

    source = Model("modelopt", **SMALL).write(tmp_path / "source", change)
    with pytest.raises(UnsupportedError, match=r"4 tensors below .*experts\.0\.gate_packed\."):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# 13: MTP layers.


def test_an_mtp_block_passes_through_and_is_counted(tmp_path: Path) -> None:
    source = with_mtp(tmp_path / "source")
    shown = runs.invoke("marlin-fp4", source, "--out", tmp_path / "out", "--device", "cpu")
    assert "18 expert tensors outside the main model" in " ".join(shown.split())
    kept = weights(tmp_path / "out")
    assert len([name for name in kept if name.startswith("mtp.0.")]) == 18
    assert kept["mtp.0.ffn.experts.2.w1.scale"][0] == "F8_E8M0"


def test_a_layer_behind_the_last_passes_through(tmp_path: Path) -> None:
    model = Model("modelopt", **{**SMALL, "layers": 2}, config={"num_hidden_layers": 1})
    source = model.write(tmp_path / "source")
    out = convert(source, tmp_path / "out")
    kept = {name for name in weights(out) if "layers.1." in name}
    assert kept == {name for name in model.tensors() if "layers.1." in name}
    assert {entry.prefix for entry in read_manifest(out).tensors} == {ONE}
    runs.invoke("verify", out, "--source", source)


# 14: shared experts, and the order of numbers.


@pytest.mark.parametrize("word", ["shared_expert", "shared_experts"])
def test_shared_experts_are_no_routed_experts(word: str, tmp_path: Path) -> None:
    parts = {
        f"model.layers.0.mlp.{word}.gate_proj.{part}": tensor
        for part, tensor in {
            "weight": ("U8", (64, 64), bytes(range(64)) * 64),
            "weight_scale": ("F8_E4M3", (64, 8), b"\x38" * 512),
            "weight_scale_2": ("F32", (), b"\0\0\x80?"),
        }.items()
    }
    model = Model("modelopt", **SMALL, extra=parts)
    out = convert(model.write(tmp_path / "source"), tmp_path / "out")
    kept = weights(out)
    for name, (dtype, _, data) in parts.items():
        assert kept[name] == (dtype, data)


def test_experts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    model = Model("modelopt", **{**SMALL, "experts": 12})
    read = held(model, convert(model.write(tmp_path / "source"), tmp_path / "out"))
    for expert in (1, 2, 9, 10, 11):
        codes = decode.weight_codes(read.expert(0, "w2_weight", expert), 128, 128)
        np.testing.assert_array_equal(codes, model.matrix(0, expert, "down").codes)


# 16: an unknown model with known names.


def test_an_unknown_model_with_known_names_is_told_how_to_go_on(tmp_path: Path) -> None:
    model = Model("modelopt", **SMALL, config={"model_type": "brand_new_moe"})
    source = model.write(tmp_path / "source")
    with pytest.raises(UnsupportedError, match="brand_new_moe, which no family") as error:
        convert(source, tmp_path / "out")
    assert "--family" in str(error.value.hint)
    assert not (tmp_path / "out").exists()
    out = convert(source, tmp_path / "out", "--family", "qwen-moe")
    same = Model("modelopt", **SMALL).write(tmp_path / "same")
    assert runs.rank_bytes(out) == runs.rank_bytes(convert(same, tmp_path / "same-out"))


# 23: payload dtypes.


@pytest.mark.parametrize("kind", ["modelopt", "mxfp4", "ct"])
@pytest.mark.parametrize("dtype", ["I8", "F4"])
def test_the_header_s_dtype_of_packed_weights_changes_nothing(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    """An F4 header counts elements, two a byte; I8 bytes are the same bits."""
    outs = []
    for code in ("U8", dtype):
        source = Model(kind, **SMALL, weight_dtype=code).write(tmp_path / code)
        outs.append(convert(source, tmp_path / f"out-{code}"))
        runs.invoke("verify", outs[-1], "--read-data", "--source", source)
    assert runs.rank_bytes(outs[0]) == runs.rank_bytes(outs[1])


@pytest.mark.parametrize("kind", ["mxfp4", "ct-mxfp4", "deepseek"])
def test_the_header_s_dtype_of_powers_of_two_changes_nothing(kind: str, tmp_path: Path) -> None:
    outs = [
        convert(
            Model(kind, **SMALL, scale_dtype=code).write(tmp_path / code), tmp_path / f"out-{code}"
        )
        for code in ("U8", "F8_E8M0")
    ]
    assert runs.rank_bytes(outs[0]) == runs.rank_bytes(outs[1])


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("kind", ["mxfp4", "deepseek"])
def test_powers_of_two_may_be_floating_point_numbers(kind: str, dtype: str, tmp_path: Path) -> None:
    def as_numbers(tensors: Tensors) -> None:
        for name, (_, shape, data) in list(tensors.items()):
            if name.endswith("scale"):
                bits = np.frombuffer(data, np.uint8).astype(np.uint32) << np.uint32(23)
                if dtype == "BF16":
                    bits = (bits >> np.uint32(16)).astype(np.uint16)
                tensors[name] = (dtype, shape, bits.tobytes())

    model, out = Model(kind, **SMALL), tmp_path / "out"
    source = model.write(tmp_path / "numbers", as_numbers)
    runs.invoke("marlin-fp4", "--mxfp4", source, "--out", out, "--device", "cpu")
    same = convert(model.write(tmp_path / "bytes"), tmp_path / "same")
    assert runs.rank_bytes(out) == runs.rank_bytes(same)
    result = json.loads(runs.invoke("verify", out, "--source", source, "--json"))
    assert result["lost"] == {}


def test_every_payload_passes_through_as_it_is(tmp_path: Path) -> None:
    data = bytes(range(256))
    extra = {
        f"odd.{dtype}": (dtype, shape, data)
        for dtype, shape in {
            "U8": (256,),
            "I8": (16, 16),
            "F4": (16, 32),
            "F8_E8M0": (256,),
            "F8_E4M3": (256,),
            "F8_E5M2": (8, 32),
            "BF16": (128,),
            "F32": (64,),
        }.items()
    }
    model = Model("modelopt", **SMALL, extra=extra)
    source = model.write(tmp_path / "source")
    out = convert(source, tmp_path / "out")
    kept = weights(out)
    assert {name: kept[name] for name in extra} == {
        n: (d, data) for n, (d, _, data) in extra.items()
    }
    runs.invoke("verify", out, "--read-data", "--source", source)


# Mixed checkpoints.


def test_bf16_layers_pass_through_and_the_report_says_so(tmp_path: Path) -> None:
    model = Model("modelopt", **{**SMALL, "layers": 3}, bf16_layers=(0, 2))
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    shown = runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
    assert "2 layers of bf16 experts" in " ".join(shown.split())
    text = runs.invoke("marlin-fp4", source, "--dry-run", "--json", "--device", "cpu")
    assert json.loads(text)["left_layers"] == 2
    kept = weights(out)
    for name, (dtype, _, data) in model.tensors().items():
        if "layers.1." not in name:
            assert kept[name] == (dtype, data)
    assert {entry.prefix for entry in read_manifest(out).tensors} == {"model.layers.1.mlp.experts"}
    runs.invoke("verify", out, "--read-data", "--source", source)


def test_modelopt_mixed_is_decided_layer_by_layer(tmp_path: Path) -> None:
    """`modelopt_mixed`: layer 0 in FP8, layer 1 in NVFP4."""
    sizes = {**SMALL, "layers": 2}

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if f"{ONE}." in name]:
            del tensors[name]
        for expert in range(2):
            for projection in PROJECTIONS:
                stem = f"{ONE}.{expert}.{projection}_proj"
                tensors[f"{stem}.weight"] = ("F8_E4M3", (128, 128), bytes([expert + 1]) * 128 * 128)
                for part in ("weight_scale", "input_scale"):
                    tensors[f"{stem}.{part}"] = ("F32", (), b"\0\0\x80?")

    source = Model("modelopt", **sizes).write(tmp_path / "source", change)
    shown = runs.invoke("marlin-fp4", source, "--out", tmp_path / "out", "--device", "cpu")
    assert "1 layer of fp8 experts" in " ".join(shown.split())
    kept = weights(tmp_path / "out")
    assert len([name for name in kept if f"{ONE}." in name]) == 18
    assert kept[f"{ONE}.1.up_proj.weight"] == ("F8_E4M3", b"\2" * 128 * 128)
    model = Model("modelopt", **sizes)
    read = held(model, tmp_path / "out")
    for name, found in read.values(1, 1).items():
        np.testing.assert_array_equal(found, source_values(model, model.matrix(1, 1, name)))


# Any TP size: the file for all sizes against one made for the size.


@pytest.mark.parametrize(
    ("kind", "hidden", "intermediate", "tp"),
    [
        ("modelopt", 256, 256, 4),
        ("nemotron", 192, 256, 2),
        ("ct-mxfp4", 128, 256, 2),
        ("deepseek", 320, 256, 4),
        ("gptoss", 160, 160, 4),  # 64, 64, 32 and nothing
        ("gptoss", 128, 64, 8),
        ("gptoss", 128, 32, 2),  # one group of w2 in the file, four in the engine's
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_each_rank_reads_what_its_own_file_holds(
    kind: str, hidden: int, intermediate: int, tp: int, engine: str, tmp_path: Path
) -> None:
    model = Model(kind, **{**SMALL, "hidden": hidden, "intermediate": intermediate})
    source = model.write(tmp_path / "source")
    options = ("--engine", engine)
    try:
        whole = convert(source, tmp_path / "any", *options)
    except UnsupportedError:
        assert engine == "sglang"
        return
    if engine == "sglang" and intermediate % (64 * tp) and kind != "gptoss":
        return
    served = {size for stack in read_manifest(whole).stacks for size in stack.tp_sizes}
    made = convert(source, tmp_path / "made", *options, "--tp", str(tp))
    if tp not in served:
        assert engine == "sglang", "halves are cut at 64, and its slices are not"
        return
    for rank in range(tp):
        ours = runs.rank_bytes(whole, tp=tp, rank=rank)
        assert ours == runs.rank_bytes(made, tp=tp, rank=rank), rank


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    model = Model("modelopt", experts=8, scales={(0, 3, "up"): 4.83e-5})
    source = model.write(tmp_path / "source")
    options = ("--device", "cpu", "--max-shard-size", "150kB")
    expected = convert(source, tmp_path / "whole", "--max-shard-size", "150kB")
    out = tmp_path / "out"
    for at in (3, 30, 50):
        code, _, _ = runs.driven("kill", at, "marlin-fp4", source, "--out", out, *options)
        assert code == -9
        assert not (out / "moeconv.json").exists()
    runs.invoke("marlin-fp4", source, "--out", out, *options)
    assert runs.shards(out) == runs.shards(expected)
    assert read_manifest(out).run.jobs_resumed > 0
    first, second = (json.loads((root / "moeconv.json").read_bytes()) for root in (out, expected))
    assert first["facts"] == second["facts"]


def test_a_resumed_run_does_not_survey_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = Model("modelopt", experts=8).write(tmp_path / "source")
    options = ("--device", "cpu", "--max-shard-size", "150kB")
    expected = convert(source, tmp_path / "whole", "--max-shard-size", "150kB")
    out = tmp_path / "out"
    code, _, _ = runs.driven("kill", 40, "marlin-fp4", source, "--out", out, *options)
    assert code == -9

    def again(*args: object) -> None:
        message = "the scales were read again"
        raise AssertionError(message)

    monkeypatch.setattr("moeconv.commands.preview.survey", again)
    runs.invoke("marlin-fp4", source, "--out", out, *options)
    assert runs.shards(out) == runs.shards(expected)
    first, second = (json.loads((root / "moeconv.json").read_bytes()) for root in (out, expected))
    assert first["facts"] == second["facts"]
