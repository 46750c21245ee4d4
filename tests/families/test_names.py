"""What is taken for a routed expert, what never is, and what is said where it cannot be told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from moeconv.errors import SourceError, UnsupportedError
from moeconv.planning.plan import Plan
from tests import runs
from tests.sources import Tensor, noise, write_checkpoint

H, I, E = 128, 64, 4
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
W1_W3_W2 = ("w1", "w3", "w2")

QWEN = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": E,
    "hidden_size": H,
    "moe_intermediate_size": I,
}


def bf16(*shape: int, name: str = "") -> Tensor:
    size = 2
    for axis in shape:
        size *= axis
    return "BF16", shape, noise(name, size)


def experts(
    prefix: str, count: int = E, names: tuple[str, ...] = GATE_UP_DOWN, size: int = I
) -> dict[str, Tensor]:
    """An expert a tensor; the last name is the down projection."""
    return {
        f"{prefix}.{e}.{name}.weight": bf16(*((H, size) if name is names[-1] else (size, H)))
        for e in range(count)
        for name in names
    }


def stacks(prefix: str, *, transposed: bool, h: int = H, i: int = I) -> dict[str, Tensor]:
    gate_up, down = (E, 2 * i, h), (E, h, i)
    if transposed:
        gate_up, down = (E, h, 2 * i), (E, i, h)
    return {f"{prefix}.gate_up_proj": bf16(*gate_up), f"{prefix}.down_proj": bf16(*down)}


def model(
    module: str, names: tuple[str, ...] = GATE_UP_DOWN, root: str = "model.layers"
) -> dict[str, Tensor]:
    """Two layers of experts."""
    return {
        **experts(f"{root}.0.{module}", names=names),
        **experts(f"{root}.1.{module}", names=names),
    }


def planned(root: Path, tensors: dict[str, Tensor], config: dict[str, Any], **wanted: Any) -> Plan:
    write_checkpoint(root / "source", tensors, config)
    return runs.plan(root / "source", runs.Wanted(**wanted))[0]


def passed(plan: Plan) -> set[str]:
    """The names that keep their bytes."""
    jobs = (job for job in plan.jobs if job.file.startswith("weights/"))
    return {tensor.name for job in jobs for tensor in job.tensors}


NEMOTRON = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "EE",
    "n_routed_experts": E,
    "hidden_size": H,
    "moe_intermediate_size": I,
}
DEEPSEEK_V4 = {**QWEN, "model_type": "deepseek_v4"}


@pytest.mark.parametrize(
    ("config", "main", "other"),
    [
        pytest.param(
            QWEN, model("mlp.experts"), experts("model.layers.2.mlp.experts", 6), id="layer-L"
        ),
        pytest.param(
            {**QWEN, "model_type": "deepseek_v3"},
            model("mlp.experts"),
            {
                **experts("model.layers.2.mlp.experts", 6, size=32),
                **experts("model.layers.3.mlp.experts", 2),
            },
            id="two-layers-of-other-sizes",
        ),
        pytest.param(
            {**QWEN, "model_type": "qwen3_next"},
            model("mlp.experts"),
            experts("mtp.layers.0.mlp.experts"),
            id="mtp.layers",
        ),
        pytest.param(
            DEEPSEEK_V4,
            model("ffn.experts", W1_W3_W2, "layers"),
            experts("mtp.0.ffn.experts", 6, W1_W3_W2),
            id="mtp.0",
        ),
        pytest.param(
            NEMOTRON,
            model("mixer.experts", ("up_proj", "down_proj"), "backbone.layers"),
            experts("mtp.layers.1.mixer.experts", 6, ("up_proj", "down_proj")),
            id="not-gated",
        ),
        pytest.param(
            {**QWEN, "model_type": "qwen3_omni_moe"},
            model("mlp.experts", root="thinker.model.layers"),
            model("mlp.experts", root="talker.model.layers"),
            id="talker",
        ),
    ],
)
def test_experts_elsewhere_pass_through_and_are_counted(
    tmp_path: Path, config: dict[str, Any], main: dict[str, Tensor], other: dict[str, Tensor]
) -> None:
    plan = planned(tmp_path, {**main, **other}, config)
    assert [stack.layer for stack in plan.stacks] == [0, 1]
    assert {stack.geometry.experts for stack in plan.stacks} == {E}
    assert plan.extra_experts == len(other)
    assert passed(plan) == set(other)


GRANITE = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 2,
    "num_local_experts": E,
    "hidden_size": H,
    "intermediate_size": I,
}
GRANITE_MODEL = {
    f"model.layers.{layer}.block_sparse_moe.{name}.weight": bf16(*shape)
    for layer in (0, 1)
    for name, shape in {"input_linear": (E, 2 * I, H), "output_linear": (E, H, I)}.items()
}
STEP = {**QWEN, "model_type": "step3p5", "moe_num_experts": E, "moe_layers_enum": "0,1"}
STEP_MODEL = {
    f"model.layers.{layer}.moe.{name}.weight": bf16(*shape)
    for layer in (0, 1)
    for name, shape in {
        "gate_proj": (E, I, H),
        "up_proj": (E, I, H),
        "down_proj": (E, H, I),
    }.items()
}


@pytest.mark.parametrize(
    ("config", "main", "others"),
    [
        pytest.param(
            QWEN,
            model("mlp.experts"),
            (
                *(f"mlp.shared_expert.{name}.weight" for name in GATE_UP_DOWN),
                "mlp.shared_expert_gate.weight",
                "mlp.gate.weight",
            ),
            id="qwen",
        ),
        pytest.param(
            {**QWEN, "model_type": "deepseek_v3"},
            model("mlp.experts"),
            (
                *(f"mlp.shared_experts.{name}.weight" for name in GATE_UP_DOWN),
                "mlp.gate.weight",
                "mlp.gate.e_score_correction_bias",
            ),
            id="deepseek",
        ),
        pytest.param(
            DEEPSEEK_V4,
            model("ffn.experts", W1_W3_W2),
            (
                *(f"ffn.shared_experts.{name}.weight" for name in W1_W3_W2),
                "ffn.gate.weight",
                "ffn.gate.bias",
                "ffn.gate.tid2eid",
            ),
            id="deepseek-v4",
        ),
        pytest.param(
            {**QWEN, "model_type": "kimi_linear"},
            model("block_sparse_moe.experts", W1_W3_W2),
            (
                *(f"block_sparse_moe.shared_experts.{name}.weight" for name in GATE_UP_DOWN),
                *(f"block_sparse_moe.{name}.weight" for name in GATE_UP_DOWN),
                "block_sparse_moe.gate.weight",
            ),
            id="kimi-linear",
        ),
        pytest.param(
            GRANITE,
            GRANITE_MODEL,
            (
                "shared_mlp.input_linear.weight",
                "shared_mlp.output_linear.weight",
                "block_sparse_moe.router.layer.weight",
            ),
            id="granite",
        ),
        pytest.param(
            STEP,
            STEP_MODEL,
            (
                "moe.gate.weight",
                "moe.router_bias",
                *(f"share_expert.{name}.weight" for name in GATE_UP_DOWN),
            ),
            id="step",
        ),
        pytest.param(
            {**QWEN, "model_type": "lfm2_moe"},
            model("feed_forward.experts", W1_W3_W2),
            (*(f"feed_forward.{name}.weight" for name in W1_W3_W2), "feed_forward.expert_bias"),
            id="lfm2",
        ),
    ],
)
def test_shared_experts_and_routers_are_no_routed_experts(
    tmp_path: Path, config: dict[str, Any], main: dict[str, Tensor], others: tuple[str, ...]
) -> None:
    beside = {f"model.layers.{layer}.{name}": bf16(I, H) for layer in (0, 1) for name in others}
    plan = planned(tmp_path, {**main, **beside}, config)
    assert passed(plan) == set(beside)
    assert plan.extra_experts == 0
    assert frozenset().union(*(stack.names for stack in plan.stacks)) == set(main)


def test_experts_sort_as_numbers(tmp_path: Path) -> None:
    config = {**QWEN, "num_hidden_layers": 1, "num_experts": 12}
    plan = planned(tmp_path, experts("model.layers.0.mlp.experts", 12), config)
    refs = plan.stacks[0].sources["down", "weight"].refs
    assert [int(ref.name.split(".")[5]) for ref in refs] == list(range(12))


class TestOrientation:
    """Stacks of one name in both orientations: rows against the config."""

    CONFIG: ClassVar = {**QWEN, "model_type": "qwen3_vl_moe", "num_hidden_layers": 1}
    PREFIX = "model.language_model.layers.0.mlp.experts"

    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize(("h", "i"), [(128, 192), (128, 128), (128, 64), (256, 64)])
    def test_told_by_shape(self, tmp_path: Path, h: int, i: int, transposed: bool) -> None:
        tensors = stacks(self.PREFIX, transposed=transposed, h=h, i=i)
        config = {**self.CONFIG, "hidden_size": h, "moe_intermediate_size": i}
        plan = planned(tmp_path, tensors, config)
        assert plan.stacks[0].sources["gate_up", "weight"].transposed is transposed
        assert (plan.stacks[0].geometry.hidden, plan.stacks[0].geometry.intermediate) == (h, i)

    def test_refused_where_the_config_is_silent(self, tmp_path: Path) -> None:
        config = {key: v for key, v in self.CONFIG.items() if not key.endswith("_size")}
        with pytest.raises(UnsupportedError, match=r"\[out, in\] or as \[in, out\]") as refused:
            planned(tmp_path, stacks(self.PREFIX, transposed=True), config)
        assert "`hidden_size` nor `moe_intermediate_size`" in str(refused.value)

    def test_neither(self, tmp_path: Path) -> None:
        tensors = stacks(self.PREFIX, transposed=True, h=96, i=32)
        with pytest.raises(SourceError, match=r"hidden_size 128, but the experts of .* have 96"):
            planned(tmp_path, tensors, self.CONFIG)


class TestZeroExperts:
    CONFIG: ClassVar = {
        "model_type": "longcat_flash",
        "num_layers": 1,
        "n_routed_experts": E,
        "zero_expert_num": 2,
        "hidden_size": H,
        "expert_ffn_hidden_size": I,
    }
    PREFIX = "model.layers.0.mlp.experts"

    def test_made_up_tensors_pass_through(self, tmp_path: Path) -> None:
        made_up = {
            f"{self.PREFIX}.{e}.{name}.weight": bf16(I, H)
            for e in (4, 5)
            for name in ("gate_proj", "up_proj")
        }
        plan = planned(tmp_path, {**experts(self.PREFIX), **made_up}, self.CONFIG)
        assert plan.stacks[0].geometry.experts == E
        assert passed(plan) == set(made_up)
        assert plan.extra_experts == len(made_up)

    def test_one_too_many(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match=r"has an expert 6, but `config.json` says 4 experts"):
            planned(tmp_path, experts(self.PREFIX, 7), self.CONFIG)


def test_puzzle_has_other_counts_in_each_layer(tmp_path: Path) -> None:
    config = {
        "model_type": "nemotron_h_puzzle",
        "hidden_size": H,
        "block_configs": [
            {"block_type": "moe", "n_routed_experts": 3, "moe_intermediate_size": 64},
            {"block_type": "mamba"},
            {"block_type": "moe", "n_routed_experts": 5, "moe_intermediate_size": 32},
        ],
    }
    names = ("up_proj", "down_proj")
    tensors = {
        **experts("backbone.layers.0.mixer.experts", 3, names, 64),
        **experts("backbone.layers.2.mixer.experts", 5, names, 32),
    }
    plan = planned(tmp_path, tensors, config)
    found = [(s.layer, s.geometry.experts, s.geometry.intermediate) for s in plan.stacks]
    assert found == [(0, 3, 64), (2, 5, 32)]


@pytest.mark.parametrize(
    "name", ["gate_up_proj_packed", "gate_up_proj.scales", "w13_weight", "0.gate_proj.lora"]
)
def test_unknown_names_below_the_experts_are_refused_by_name(tmp_path: Path, name: str) -> None:
    prefix = "model.language_model.layers.0.mlp.experts"
    tensors = {**stacks(prefix, transposed=False), f"{prefix}.{name}": bf16(E, I, H)}
    config = {**QWEN, "model_type": "qwen3_5_moe", "num_hidden_layers": 1}
    with pytest.raises(UnsupportedError, match=re.escape(f"{name}`")):
        planned(tmp_path, tensors, config)


class TestUnknownModelType:
    def hint(self, root: Path, tensors: dict[str, Tensor], **config: Any) -> str:
        with pytest.raises(UnsupportedError, match=r"model_type novel, which no family") as refused:
            planned(root, tensors, {**QWEN, "model_type": "novel", **config})
        assert refused.value.hint
        return refused.value.hint

    def test_one_family_fits(self, tmp_path: Path) -> None:
        hint = self.hint(tmp_path, GRANITE_MODEL, num_local_experts=E, intermediate_size=I)
        assert hint.startswith("`--family granite-moe` reads its experts")
        (tmp_path / "again").mkdir()
        config = {**GRANITE, "model_type": "novel"}
        plan = planned(tmp_path / "again", GRANITE_MODEL, config, family="granite-moe")
        assert plan.family.name == "granite-moe"

    def test_several_fit_alike(self, tmp_path: Path) -> None:
        hint = self.hint(tmp_path, model("mlp.experts"))
        assert hint.startswith("say `--family` with one of these, which all read its experts alike")
        assert "qwen-moe" in hint
        assert "mixtral" not in hint

    def test_several_fit_in_different_orders(self, tmp_path: Path) -> None:
        prefixes = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
        tensors = {k: t for prefix in prefixes for k, t in stacks(prefix, transposed=True).items()}
        hint = self.hint(tmp_path, tensors, intermediate_size=I)
        assert "gpt-oss, qwen3-vl-moe, which take the same bytes in different orders" in hint

    def test_names_fit_but_the_config_does_not(self, tmp_path: Path) -> None:
        hint = self.hint(tmp_path, model("block_sparse_moe.experts", W1_W3_W2), num_experts=9)
        assert hint.startswith("its experts are named as in ")
        assert "mixtral" in hint
        assert "is missing: expected 9 experts" in hint

    def test_no_names_fit(self, tmp_path: Path) -> None:
        hint = self.hint(tmp_path, {"model.norm.weight": bf16(H)})
        assert "nor are its experts named as one of them names its own" in hint

    def test_family_that_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError, match="`--family quen` is no family") as refused:
            planned(tmp_path, model("mlp.experts"), QWEN, family="quen")
        assert "qwen-moe" in (refused.value.hint or "")

    def test_text_part_is_enough(self, tmp_path: Path) -> None:
        tensors = model("mlp.experts", root="language_model.model.layers")
        plan = planned(tmp_path, tensors, {"model_type": "novel_vl", "llm_config": QWEN})
        assert plan.family.name == "qwen-moe"
