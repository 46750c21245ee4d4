"""Every expert is accounted for: what is missing, surplus or unknown is said by name."""

from __future__ import annotations

import json

import pytest

from moeconv.errors import SourceError, UnsupportedError
from tests import runs
from tests.sources import Tensor, Tiny, noise, write_checkpoint

PREFIX = "model.layers.{}.mlp.experts"


def bf16(name: str, *shape: int) -> Tensor:
    size = 2
    for length in shape:
        size *= length
    return "BF16", shape, noise(name, size)


def written(tmp_path, tensors: dict[str, Tensor], tiny: Tiny, **config):
    whole = {**tiny.model_config(), **config}
    return write_checkpoint(tmp_path / "source", tensors, whole, shards=2)


@pytest.mark.parametrize("storage", ["per-expert", "stacked", "transposed", "plain"])
def test_experts_times_layers_times_projections_are_converted(make_checkpoint, storage):
    root = make_checkpoint(storage=storage, experts=3, layers=2)
    plan, checkpoint = runs.plan(root)
    names = {name for stack in plan.stacks for name in stack.names}
    assert len(plan.stacks) == 2
    assert len(names) == {"per-expert": 18, "plain": 12}.get(storage, 4)
    assert names == {name for name in checkpoint.tensors if ".experts." in name}
    for stack in plan.stacks:
        sizes = stack.geometry
        assert (sizes.experts, sizes.hidden, sizes.intermediate) == (3, 128, 128)
        assert sizes.gated == (storage != "plain")


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        (
            "1.mlp.experts.2.up_proj",
            r"`model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight` is miss",
        ),
        ("1.mlp.experts.3.", r"experts\.3\.gate_proj\.weight` is missing: expected 4 experts"),
        ("0.mlp.experts.0.", r"experts\.0\.gate_proj\.weight` is missing"),
        (".down_proj.", "no down projection, only gate, up"),
        ("1.mlp.experts.", r"layer 1 has no experts, but `config\.json` promises them"),
        (".mlp.experts.", "no routed experts under the names of the family"),
    ],
)
def test_what_is_missing_is_named(tmp_path, gone, words):
    tiny = Tiny()
    tensors = {name: tensor for name, tensor in tiny.tensors().items() if gone not in name}
    with pytest.raises((SourceError, UnsupportedError), match=words):
        runs.plan(written(tmp_path, tensors, tiny))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_experts": 3}, "has an expert 3, but .* 3 experts"),
        ({"num_experts": 5}, r"experts\.4\.gate_proj\.weight` is missing: expected 5 experts"),
        ({"num_experts": None}, "does not say `num_experts`"),
        ({"num_experts": "4"}, "sets `num_experts` to '4', expected an integer"),
        ({"num_hidden_layers": 3}, "layer 2 has no experts"),
        ({"num_hidden_layers": None}, "does not say `num_hidden_layers`"),
        ({"hidden_size": 64}, "says hidden_size 64, but .* have 128"),
        ({"moe_intermediate_size": 64}, "says moe_intermediate_size 64, but .* have 128"),
        ({"mlp_only_layers": [1]}, r"layer 1 has experts, but `config\.json` says it is dense"),
        ({"decoder_sparse_step": 2}, "layer 0 has experts, but"),
    ],
    ids=str,
)
def test_a_config_of_another_model_is_refused(make_checkpoint, config, words):
    with pytest.raises(SourceError, match=words):
        runs.plan(make_checkpoint(config=config))


def test_a_config_of_fewer_stacked_experts_is_refused(make_checkpoint):
    with pytest.raises(SourceError, match="expected 3 experts first"):
        runs.plan(make_checkpoint(storage="stacked", config={"num_experts": 3}))


def test_one_expert_of_another_shape_is_refused(tmp_path):
    tiny = Tiny()
    name = f"{PREFIX.format(1)}.2.up_proj.weight"
    tensors = {**tiny.tensors(), name: bf16(name, 64, 128)}
    with pytest.raises(SourceError, match=r"experts\.2\.up_proj\.weight` is BF16 \[64, 128\]"):
        runs.plan(written(tmp_path, tensors, tiny))


def test_an_untransposed_stack_of_a_transposed_family_is_refused(tmp_path):
    """Llama 4 stores `[E, H, 2I]`; the published shape alone cannot be guessed at."""
    tiny = Tiny(storage="transposed", hidden=256, intermediate=192)
    tensors = {
        name: (dtype, (shape[0], *shape[:0:-1]), data)
        if ".experts." in name
        else (dtype, shape, data)
        for name, (dtype, shape, data) in tiny.tensors().items()
    }
    with pytest.raises((SourceError, UnsupportedError)):
        runs.plan(written(tmp_path, tensors, tiny))


def test_a_suffix_that_no_family_maps_is_refused(make_checkpoint):
    """CASES 12."""
    name = f"{PREFIX.format(0)}.gate_up_proj_packed"
    root = make_checkpoint(storage="stacked", extra={name: ("U8", (4, 256, 64), bytes(65536))})
    with pytest.raises(UnsupportedError, match=r"_packed"):
        runs.plan(root)


def test_an_unknown_name_below_the_experts_is_an_error(make_checkpoint):
    name = f"{PREFIX.format(0)}.9.bonus_proj.weight"
    with pytest.raises(UnsupportedError, match=name.replace(".", r"\.")):
        runs.plan(make_checkpoint(extra={name: bf16(name, 2, 2)}))


def test_an_expert_twice_is_an_error(make_checkpoint):
    """`00` and `0` are the same number."""
    name = f"{PREFIX.format(0)}.00.up_proj.weight"
    with pytest.raises((SourceError, UnsupportedError)):
        runs.plan(make_checkpoint(extra={name: bf16(name, 128, 128)}))


def test_mtp_layers_pass_through(make_checkpoint, tmp_path):
    """CASES 13: a layer beyond `num_hidden_layers`, with other experts than the main stack."""
    mtp = {
        f"{PREFIX.format(2)}.{e}.{name}_proj.weight": bf16(f"{e}.{name}", 64, 64)
        for e in range(2)
        for name in ("gate", "up", "down")
    }
    root = make_checkpoint(extra={**mtp, "mtp.0.norm.weight": bf16("mtp", 128)})
    plan, _ = runs.plan(root)
    assert plan.extra_experts == 6
    out = runs.run(root, tmp_path / "out")
    manifest = json.loads((out / "moeconv.json").read_text())
    kept = {entry["name"] for entry in manifest["weights"]}
    assert {*mtp, "mtp.0.norm.weight"} <= kept
    assert len(manifest["stacks"]) == 2


def test_shared_experts_are_not_routed(make_checkpoint, tmp_path):
    """CASES 14."""
    shared = {
        f"model.layers.0.mlp.{name}.up_proj.weight": bf16(name, 128, 128)
        for name in ("shared_expert", "shared_experts")
    }
    shared["model.layers.0.mlp.shared_expert_gate.weight"] = bf16("gate", 1, 128)
    out = runs.run(make_checkpoint(extra=shared), tmp_path / "out")
    manifest = json.loads((out / "moeconv.json").read_text())
    assert shared.keys() <= {entry["name"] for entry in manifest["weights"]}


def test_experts_sort_as_numbers(make_checkpoint, tmp_path):
    """CASES 14: expert 10 comes after 9; a stack of the same weights is the oracle."""
    per_expert = Tiny(experts=12, layers=1)
    tensors = per_expert.tensors()
    stacks = {
        f"{PREFIX.format(0)}.{stack}": (
            "BF16",
            (12, 128 * len(names), 128),
            b"".join(
                tensors[f"{PREFIX.format(0)}.{e}.{name}_proj.weight"][2]
                for e in range(12)
                for name in names
            ),
        )
        for stack, names in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
    }
    one = make_checkpoint("one", experts=12, layers=1)
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    other = write_checkpoint(tmp_path / "two", {**others, **stacks}, per_expert.model_config())
    read = [runs.rank_bytes(runs.run(root, tmp_path / f"{root.name}.out")) for root in (one, other)]
    assert read[0] == read[1]


@pytest.mark.parametrize(
    ("dtype", "name", "hint"),
    [
        ("F16", "fp16", "save the checkpoint in bfloat16 first"),
        ("F32", "fp32", "save the checkpoint in bfloat16 first"),
    ],
)
def test_other_floats_are_refused_by_name(make_checkpoint, dtype, name, hint):
    with pytest.raises(UnsupportedError, match=f"stored as {name} .* takes bf16") as error:
        runs.plan(make_checkpoint(dtype=dtype))
    assert hint in str(error.value.hint)


def test_fp8_as_deepseek_publishes_it_is_refused_by_name(tmp_path):
    tiny = Tiny(dtype="F8_E4M3")
    scales = {
        f"{name.removesuffix('.weight')}.weight_scale_inv": ("F32", (1, 1), bytes(4))
        for name in tiny.tensors()
        if ".experts." in name
    }
    with pytest.raises(UnsupportedError, match="stored as fp8-block") as error:
        runs.plan(written(tmp_path, {**tiny.tensors(), **scales}, tiny))
    assert "DeepSeek-V3, Kimi-K2 and MiniMax-M2" in str(error.value.hint)


def test_a_mixture_of_dtypes_is_refused(tmp_path):
    tiny = Tiny()
    name = f"{PREFIX.format(1)}.2.up_proj.weight"
    tensors = {**tiny.tensors(), name: ("F16", (128, 128), bytes(32768))}
    with pytest.raises(UnsupportedError, match=r"stored in no scheme that is known"):
        runs.plan(written(tmp_path, tensors, tiny))


def test_an_unknown_model_type_is_said_with_how_to_proceed(make_checkpoint):
    """CASES 16."""
    root = make_checkpoint(config={"model_type": "brand_new_moe"})
    with pytest.raises(UnsupportedError, match="brand_new_moe, which no family") as error:
        runs.plan(root)
    assert "`--family`" in str(error.value.hint)
    plan, _ = runs.plan(root, runs.Wanted(family="qwen-moe"))
    assert plan.family.name == "qwen-moe"
    with pytest.raises(UnsupportedError, match="`--family none` is no family"):
        runs.plan(root, runs.Wanted(family="none"))
