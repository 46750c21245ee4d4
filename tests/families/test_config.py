"""What a config says of a family's layers, sizes, activation and routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moeconv.errors import SourceError
from moeconv.families import FAMILIES
from moeconv.families.family import Family
from moeconv.planning.modelconfig import (
    activation,
    is_clamped,
    layer_count,
    layer_integer,
    moe_layers,
    renormalises,
    scoring,
)


def family(model_type: str) -> Family:
    return next(family for family in FAMILIES if model_type in family.model_types)


def test_names_and_model_types_are_each_in_one_row() -> None:
    names = [family.name for family in FAMILIES]
    types = [name for family in FAMILIES for name in family.model_types]
    assert len(set(names)) == len(names)
    assert len(set(types)) == len(types)
    assert names == sorted(names, key=lambda name: name.replace(".", "_").replace("-", "_"))


SIX = {"num_hidden_layers": 6}
EVERY = {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("mixtral", SIX, EVERY),
        ("qwen2_moe", {**SIX, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, {3, 5}),
        ("qwen3_vl_moe", {"text_config": {**SIX, "mlp_only_layers": [0]}}, {1, 2, 3, 4, 5}),
        ("qwen3_omni_moe", {"thinker_config": {"text_config": SIX}}, EVERY),
        ("deepseek_v3", {**SIX, "first_k_dense_replace": 3}, {3, 4, 5}),
        ("deepseek_v3", {**SIX, "first_k_dense_replace": 1, "moe_layer_freq": 2}, {2, 4}),
        ("glm4_moe_lite", {**SIX, "mlp_layer_types": ["dense", *["sparse"] * 5]}, {1, 2, 3, 4, 5}),
        ("deepseek_v4", {**SIX, "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4}, EVERY),
        (
            "minimax_m3_vl",
            {"text_config": {**SIX, "moe_layer_freq": [0, 0, 1, 1, 1, 1]}},
            {2, 3, 4, 5},
        ),
        ("llama4", {**SIX, "moe_layers": [1, 4], "interleave_moe_layer_step": 2}, {1, 4}),
        ("llama4", {**SIX, "interleave_moe_layer_step": 2}, {1, 3, 5}),
        ("llama4", {**SIX, "interleave_moe_layer_step": 0}, set()),
        ("jamba", {**SIX, "expert_layer_period": 3, "expert_layer_offset": 1}, {1, 4}),
        ("step3p5", {**SIX, "moe_layers_enum": "3,4,5,6"}, {3, 4, 5}),
        ("step3_text", {**SIX, "moe_layers_enum": [2, 3]}, {2, 3}),
        ("step3_text", SIX, {1, 2, 3, 4, 5}),
        ("lfm2_moe", {**SIX, "num_dense_layers": 2}, {2, 3, 4, 5}),
        (
            "ernie4_5_moe",
            {**SIX, "moe_layer_start_index": 1, "moe_layer_end_index": -1},
            {1, 2, 3, 4, 5},
        ),
        (
            "ernie4_5_moe",
            {**SIX, "moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2},
            {1, 3},
        ),
        ("nemotron_h", {**SIX, "hybrid_override_pattern": "MEM*-E"}, {1, 5}),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention"]}, {1}),
        (
            "nemotron_h_puzzle",
            {"block_configs": [{"block_type": "mamba"}, {"block_type": "moe"}]},
            {1},
        ),
        ("longcat_flash", {"num_layers": 2, "num_hidden_layers": 4}, {0, 1}),
    ],
)
def test_layers(model_type: str, config: dict[str, Any], expected: set[int]) -> None:
    assert moe_layers(family(model_type), config) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "does not say `num_hidden_layers`"),
        ({"num_hidden_layers": "six"}, None),
        ({"num_hidden_layers": 6.0}, "`num_hidden_layers` to 6.0, expected an integer"),
        ({**SIX, "mlp_layer_types": ["dense"]}, "1 items in `mlp_layer_types` for 6 layers"),
        ({**SIX, "first_k_dense_replace": [1]}, "`first_k_dense_replace` to"),
    ],
)
def test_what_cannot_be_read_is_named(config: dict[str, Any], words: str | None) -> None:
    if words is None:  # a string has an item a layer
        assert layer_count(family("deepseek_v3"), config) == 3
        return
    with pytest.raises(SourceError, match=words):
        moe_layers(family("deepseek_v3"), config)


def test_layer_numbers_that_are_none() -> None:
    with pytest.raises(SourceError, match="`moe_layers_enum` to '3,four', expected layer numbers"):
        moe_layers(family("step3p5"), {**SIX, "moe_layers_enum": "3,four"})


def test_sizes_may_differ_from_layer_to_layer() -> None:
    hunyuan = family("hunyuan_v1_moe")
    config: dict[str, Any] = {**SIX, "num_experts": [8, 8, 4, 4, 2, 2], "moe_intermediate_size": 96}
    assert [layer_integer(hunyuan, config, hunyuan.experts, i) for i in (0, 2, 5)] == [8, 4, 2]
    assert layer_integer(hunyuan, config, hunyuan.intermediate, 3) == 96
    with pytest.raises(SourceError, match=r"`num_experts` to \[8\], expected an integer"):
        layer_integer(hunyuan, {**SIX, "num_experts": [8]}, hunyuan.experts, 0)

    puzzle = family("nemotron_h_puzzle")
    config = {
        "n_routed_experts": 9,
        "block_configs": [{"block_type": "moe", "n_routed_experts": 5}, {"block_type": "moe"}],
    }
    assert [layer_integer(puzzle, config, puzzle.experts, i) for i in (0, 1)] == [5, 9]


@pytest.mark.parametrize(
    ("model_type", "config", "kind", "clamped"),
    [
        ("qwen3_moe", {"hidden_act": "silu"}, "silu", False),
        ("qwen3_moe", {"hidden_act": "swish"}, "silu", False),
        ("qwen3_moe", {"hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh", False),
        ("lfm2_moe", {}, "silu", False),
        ("gpt_oss", {"hidden_act": "silu", "swiglu_limit": 7.0}, "swigluoai", True),
        ("minimax_m3_vl", {"text_config": {"hidden_act": "silu"}}, "swigluoai", False),
        ("aria_text", {"hidden_act": "gelu"}, "silu", False),
        ("kimi_k3", {"text_config": {"hidden_act": "situ"}}, "situ", False),
        ("nemotron_h", {"mlp_hidden_act": "relu2", "hidden_act": "silu"}, "relu2", False),
        ("deepseek_v4", {"hidden_act": "silu", "swiglu_limit": 10.0}, "silu", True),
        ("step3p5", {"swiglu_limits": [0.0, 7.0]}, "silu", True),
        ("step3p5", {"swiglu_limits": [0.0, 0.0]}, "silu", False),
        ("bailing_hybrid", {"expert_swiglu_limit_list": [7.0]}, "silu", True),
    ],
)
def test_activation(model_type: str, config: dict[str, Any], kind: str, clamped: bool) -> None:
    assert activation(family(model_type), config) == kind
    assert is_clamped(family(model_type), config) is clamped


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("qwen2_moe", {"norm_topk_prob": False}, False),
        ("qwen3_moe", {"norm_topk_prob": True}, True),
        ("qwen3_moe", {}, None),
        ("qwen3_vl_moe", {"text_config": {"norm_topk_prob": False}}, True),
        ("mixtral", {}, True),
        ("phimoe", {}, False),
        ("jamba", {}, False),
        ("olmoe", {}, False),
        ("deepseek_v2", {}, False),
        ("kimi_linear", {"moe_renormalize": True}, True),
        ("hy_v3", {"route_norm": False}, False),
        ("step3_text", {}, False),
        ("step3p5", {}, True),
        ("llama4", {}, False),
    ],
)
def test_renormalising(model_type: str, config: dict[str, Any], expected: bool | None) -> None:
    assert renormalises(family(model_type), config) is expected


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("qwen3_moe", {}, "softmax"),
        ("deepseek_v2", {"scoring_func": "softmax"}, "softmax"),
        ("deepseek_v3", {}, "sigmoid"),
        ("deepseek_v4", {"scoring_func": "sqrtsoftplus"}, "sqrtsoftplus"),
        ("bailing_moe_v2", {"score_function": "sigmoid"}, "sigmoid"),
        ("bailing_hybrid", {}, "sigmoid"),
    ],
)
def test_scoring(model_type: str, config: dict[str, Any], expected: str) -> None:
    assert scoring(family(model_type), config) == expected


def test_own_routings_are_named() -> None:
    own: Callable[[str], str | None] = lambda name: family(name).routing.custom  # noqa: E731
    assert own("phimoe") == "sparsemixer"
    assert own("llama4")
    assert own("qwen3_moe") is None
