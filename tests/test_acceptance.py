"""What engines do not take: by activation, routing, number of experts; and what follows from it."""

from __future__ import annotations

import pytest

from moeconv.errors import UnsupportedError
from moeconv.families import FAMILIES
from moeconv.layouts import LAYOUTS, TRTLLM_BF16
from moeconv.planning.acceptance import ROWS, answers, check_engines
from moeconv.planning.traits import Kind, model_of
from tests import runs


def model(model_type, config=None, *, experts=8, names=(), scheme="bf16", hidden=2048):
    family = next(family for family in FAMILIES if model_type in family.model_types)
    kind = Kind(scheme, experts, hidden, 768, family.gated)
    return model_of(family, {"model_type": model_type, **(config or {})}, (kind,), names)


def named(name):
    return next(layout for layout in LAYOUTS if layout.id == name)


def said(layout, one):
    return {answer.engine.name: answer for answer in answers(layout, one)}


ALL_TO_ALL = "only its all-to-all path"


@pytest.mark.parametrize(
    ("model_type", "config", "routing", "vllm"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}, "RenormalizeNaive", "yes"),
        ("qwen2_moe", {"norm_topk_prob": False}, "Default", "yes, but"),
        ("qwen2_moe", {}, "Default or RenormalizeNaive", "yes, but"),
        ("deepseek_v2", {}, "Default", "yes, but"),
        ("deepseek_v2", {"norm_topk_prob": True}, "RenormalizeNaive", "yes"),
        ("deepseek_v3", {"norm_topk_prob": True}, "SigmoidRenorm", "yes"),
        ("olmoe", {}, "Default", "yes, but"),
        ("jamba", {}, "Default", "yes, but"),
        ("phimoe", {}, "Custom", "yes, but"),
        ("flex_olmo", {"norm_topk_prob": True}, "Custom", "yes, but"),
        ("llama4", {}, "Llama4", "yes"),
        ("ernie4_5_moe", {}, "Unspecified", "yes, but"),
        ("longcat_flash", {}, "Unspecified", "yes, but"),
        ("glm4_moe", {"norm_topk_prob": False}, "Unspecified", "yes, but"),
        ("glm4_moe", {"norm_topk_prob": True}, "DeepSeekV3", "yes"),
        ("mixtral", {}, "RenormalizeNaive", "yes"),
    ],
)
def test_routings_that_vllms_monolithic_kernel_takes(model_type, config, routing, vllm):
    one = model(model_type, config)
    answer = said(TRTLLM_BF16, one)["vllm"]
    assert (one.routing, answer.word) == (routing, vllm)
    if vllm == "yes, but" and routing != "Default or RenormalizeNaive":
        assert f"{ALL_TO_ALL} takes {routing} routing" in answer.reasons[0]
    assert not any(ALL_TO_ALL in reason for reason in said(TRTLLM_BF16, one)["sglang"].reasons)


def test_a_bias_of_the_router_is_seen_in_the_names():
    config = {"norm_topk_prob": True}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert model("deepseek_v3", config).routing == "SigmoidRenorm"
    assert model("deepseek_v3", config, names=("x", bias)).routing == "DeepSeekV3"
    assert model("qwen3_moe", config, names=(bias,)).routing == "Unspecified"


@pytest.mark.parametrize(
    ("model_type", "config", "words"),
    [
        ("gpt_oss", {}, "these use swigluoai"),
        ("minimax_m3_text", {}, "these use swigluoai"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "these use gelu"),
        ("nemotron_h", {"mlp_hidden_act": "gelu"}, "these use gelu"),
    ],
)
def test_activations_that_no_trtllm_kernel_takes(model_type, config, words):
    with pytest.raises(UnsupportedError, match=words) as error:
        check_engines(TRTLLM_BF16, model(model_type, config))
    assert str(error.value).startswith("no engine takes this model in the layout trtllm-bf16: vllm")


def test_relu2_without_a_gate_is_taken():
    assert check_engines(TRTLLM_BF16, model("nemotron_h")) == ()


def test_more_than_2048_experts():
    assert check_engines(TRTLLM_BF16, model("mixtral", experts=2048)) == ()
    with pytest.raises(UnsupportedError, match="at most 2048 experts; there are 4096"):
        check_engines(TRTLLM_BF16, model("mixtral", experts=4096))


def test_a_limit_on_gate_and_up():
    (vllm, sglang) = check_engines(TRTLLM_BF16, model("exaone_moe", {"swiglu_limits": [0, 7.0]}))
    assert "limits gate and up" in vllm
    assert sglang.startswith("sglang")
    answer = said(TRTLLM_BF16, model("step3p5", {"swiglu_limits": [0, 7.0]}))["vllm"]
    assert (answer.word, "swiglustep" in answer.reasons[0]) == ("no", True)


def test_models_that_an_engine_does_not_have():
    word = said(TRTLLM_BF16, model("dots1", {"norm_topk_prob": True}))
    assert (word["vllm"].word, word["sglang"].word) == ("no", "yes, but")
    assert check_engines(TRTLLM_BF16, model("dots1"))
    layout = named("marlin-mxfp4")
    with pytest.raises(UnsupportedError, match="with the code of transformers, and not in MXFP4"):
        check_engines(layout, model("hunyuan_v1_moe", scheme="mxfp4"))


def test_an_odd_number_of_experts():
    (warning, _) = check_engines(TRTLLM_BF16, model("mixtral", experts=5))
    assert "5 experts do not divide among an even number" in warning


def test_sizes_that_sglang_asks_of_compressed_tensors():
    layout = named("marlin-nvfp4-sglang")
    assert check_engines(layout, model("mixtral", scheme="modelopt-nvfp4", hidden=2112)) == ()
    with pytest.raises(UnsupportedError, match="a multiple of 128"):
        check_engines(layout, model("mixtral", scheme="ct-nvfp4", hidden=2112))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_every_layout_says_what_gpu_it_needs(layout):
    for answer in answers(layout, model("mixtral")):
        assert "compute capability" in answer.needs[0]
        assert ("on Blackwell it is a fallback" in answer.needs[-1]) == ("fp4" in layout.id)


def test_every_row_says_something_of_some_layout():
    engines = {(it.id, engine.name) for it in LAYOUTS for engine in it.engines}
    for row in ROWS:
        assert any(
            name.startswith(row.layouts) and engine in row.engines for name, engine in engines
        )
        text = row.words.format(
            model_type="", family="", activation="", routing="", experts=0, is_clamped="", kinds=""
        )
        assert text
        assert not text.endswith(".")


def test_a_conversion_that_no_engine_takes_is_refused(make_checkpoint, tmp_path):
    source = make_checkpoint(config={"hidden_act": "gelu", "norm_topk_prob": True})
    out = tmp_path / "out"
    for more in ((), ("--dry-run",)):
        done = runs.moeconv("trtllm", source, "--out", out, *more)
        assert (done.returncode, done.stdout) == (4, "")
        assert "no engine takes this model in the layout trtllm-bf16" in done.stderr
    assert not out.exists()


def test_what_one_engine_does_not_take_is_warned_of(make_checkpoint, tmp_path):
    source = make_checkpoint(config={"norm_topk_prob": False})
    done = runs.moeconv("trtllm", source, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("warning")]
    assert f"vllm >=0.33,<0.34: {ALL_TO_ALL}" in warning
