"""What both loaders share, without an engine: pairing, admission, and whose memory is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moeconv.errors import UnsupportedError, VerifyError
from moeconv.layouts import LAYOUTS
from moeconv.output.manifest import StackEntry
from moeconv.serving import open_converted
from moeconv.serving.admission import check_dtype, engine_entry, options, refuse
from moeconv.serving.methods import Method
from moeconv.serving.pairing import Assigned, check_coverage, check_pairs, check_sizes, pair
from moeconv.serving.placing import check_new, finish, place_all
from moeconv.serving.rank import RankTensor
from moeconv.serving.reader import ConvertedDirectory

PREFIX = "model.layers.{}.mlp.experts"


def stack(layer: int, prefix: str = PREFIX) -> StackEntry:
    return StackEntry(
        prefix.format(layer),
        layer,
        experts=4,
        hidden=128,
        intermediate=128,
        gated=True,
        order="halves",
        scheme="bf16",
        tp_sizes=(1, 2),
    )


class Experts(torch.nn.Module):
    """A module with the parameters of the checkpoint `Tiny`, as an engine makes them."""

    def __init__(self, experts: int = 4, intermediate: int = 128, hidden: int = 128) -> None:
        super().__init__()
        self.register("w13_weight", experts, 2 * intermediate, hidden)
        self.register("w2_weight", experts, hidden, intermediate)

    def register(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        data = torch.full(shape, 7.0).to(dtype)
        self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))


def method(**fields: object) -> Method:
    row = Method(
        "torch.nn.modules.linear:Linear",
        frozenset({"trtllm-bf16"}),
        "TRTLLM",
        "start it with `--backend trtllm`",
        lambda module: None,
    )
    return replace(row, **fields)  # type: ignore[arg-type]


def assigned(converted: ConvertedDirectory, module: torch.nn.Module, **fields: object) -> Assigned:
    view = converted.rank()
    name = PREFIX.format(0)
    return Assigned(name, module, method(**fields), view, view.tensors(name))


def put(job: Assigned, tensor: RankTensor, data: torch.Tensor) -> None:
    job.module.get_parameter(tensor.param).data = data


@pytest.fixture
def directory(converted: Path) -> ConvertedDirectory:
    return open_converted(converted)


@pytest.mark.parametrize("keeps_shape", [True, False])
def test_bytes_go_into_the_parameters_own_storage(directory, keeps_shape):
    module = Experts()
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    job = assigned(directory, module, keeps_shape=keeps_shape)
    check_coverage(job)
    place_all([job], put, threads=2, check=True)
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == before
    for tensor in job.tensors:
        wanted = torch.empty(tensor.nbytes, dtype=torch.uint8)
        job.rank.read_into(tensor, wanted)
        found = module.get_parameter(tensor.param)
        assert torch.equal(found.data.view(-1).view(torch.uint8), wanted)
        shape = (4, 256, 128) if tensor.param == "w13_weight" else (4, 128, 128)
        assert tuple(found.shape) == (shape if keeps_shape else tensor.spec.shape)


def test_one_fresh_tensor_where_the_layout_pads_further(make_checkpoint, tmp_path):
    from tests import runs

    out = runs.run(make_checkpoint("narrow", intermediate=64), tmp_path / "narrow-out")
    module = Experts(intermediate=64)
    with open_converted(out) as converted:
        with pytest.raises(VerifyError, match=r"holds 131072 bytes of w13_weight, but .* 262144"):
            check_coverage(assigned(converted, module))
        job = assigned(converted, module, pads_late=True)
        check_coverage(job)
        place_all([job], put, threads=1, check=False)
    down = module.get_parameter("w2_weight")
    assert tuple(module.get_parameter("w13_weight").shape) == (4, 2, 256, 64)
    assert tuple(down.shape) == (4, 2, 128, 64)
    assert down[:, 1].count_nonzero() == 0


def test_bytes_without_a_parameter_and_parameters_without_bytes(directory):
    module = Experts()
    module.register("w2_bias", 4)
    with pytest.raises(VerifyError, match=r"expected converted bytes of .*w2_bias.*, found"):
        check_coverage(assigned(directory, module))
    check_coverage(assigned(directory, module, drop=("w2_bias",)))
    check_coverage(assigned(directory, module, unread=("w2_bias",)))
    del module.w2_weight
    with pytest.raises(VerifyError):
        check_coverage(assigned(directory, module, drop=("w2_bias",)))
    check_coverage(assigned(directory, module, drop=("w2_bias",), fresh=frozenset({"w2_weight"})))


def test_a_filled_module_is_not_filled_again(directory):
    module = Experts()
    module.register("w2_bias", 4)
    job = assigned(directory, module, drop=("w2_bias",))
    check_new(job.name, module)
    finish(job)
    assert not hasattr(module, "w2_bias")
    with pytest.raises(UnsupportedError, match="restart it"):
        check_new(job.name, module)


def test_modules_take_stacks_by_the_models_own_names():
    rows = [stack(0, "backbone.layers.{}.mixer.experts"), stack(1)]
    names = ["model.layers.0.mixer.experts", "model.layers.1.mlp.experts"]
    paired = pair(names, rows, lambda name: name.replace("backbone.", "model."))
    assert paired == dict(zip(names, rows, strict=True))


def test_the_layer_number_decides_where_it_is_unique():
    rows = [stack(3, "layers.{}.ffn.experts"), stack(4, "layers.{}.ffn.experts")]
    names = ["model.layers.3.moe", "model.layers.4.moe", "model.layers.4.other"]
    assert pair(names, rows, lambda name: None) == {"model.layers.3.moe": rows[0]}


def test_a_stack_without_a_module_is_for_another_stage_or_an_error():
    rows = [stack(0), stack(1)]
    check_pairs({"x": rows[0]}, rows, is_staged=True)
    with pytest.raises(UnsupportedError, match=r"for 1 of the stacks: `model\.layers\.1"):
        check_pairs({"x": rows[0]}, rows, is_staged=False)


def test_sizes_must_be_the_stacks():
    check_sizes("x", stack(0), (4, 128, 128, True))
    with pytest.raises(VerifyError, match=r"= \(4, 128, 256, True\), but the converted"):
        check_sizes("x", stack(0), (4, 128, 256, True))


def test_a_method_is_matched_by_its_very_class():
    class Sub(torch.nn.Linear):
        pass

    Sub.__name__ = "Linear"
    row = method()
    assert row.matches(torch.nn.Linear(1, 1), "trtllm-bf16")
    assert not row.matches(torch.nn.Linear(1, 1), "marlin-nvfp4")
    assert not row.matches(Sub(1, 1), "trtllm-bf16")
    row.check("x", "TRTLLM", "Any")
    with pytest.raises(UnsupportedError, match=r"chose TRITON \(Any\).*`--backend trtllm`"):
        row.check("x", "TRITON", "Any")
    with pytest.raises(UnsupportedError):
        method(experts=frozenset({"Mine"})).check("x", "TRTLLM", "Any")


@pytest.mark.parametrize("version", ["0.33.0", "0.33.7", "0.33.1rc2.dev3+cu130"])
def test_versions_of_the_range_are_taken(directory, version):
    assert engine_entry(directory, "vllm", version).backend == "--moe-backend flashinfer_trtllm"


@pytest.mark.parametrize("version", ["0.32.9", "0.34.0", "1.0", "0.34.0rc1", "unknown"])
def test_other_versions_are_refused(directory, version):
    with pytest.raises(UnsupportedError, match=r"tested with vllm >=0\.33,<0\.34; this is"):
        engine_entry(directory, "vllm", version)


def test_another_engine_is_refused(directory):
    with pytest.raises(UnsupportedError, match="for vllm or sglang, not for tensorrt"):
        engine_entry(directory, "tensorrt", "1.0")


def test_another_dtype_is_refused_with_the_flag(directory):
    check_dtype(directory, torch.bfloat16)
    with pytest.raises(UnsupportedError, match="`--dtype bfloat16`"):
        check_dtype(directory, torch.float16)


def test_all_reasons_are_said_at_once():
    refuse(Path("here"), (None, None))
    with pytest.raises(UnsupportedError, match=r"`here` cannot be loaded.*: one; two"):
        refuse(Path("here"), ("one", None, "two"))


def test_options_of_the_loader():
    assert options({}) == (None, False)
    assert options({"threads": 3, "check": True}) == (3, True)
    for wrong in ({"thread": 3}, {"threads": 0}, {"threads": True}, {"check": 1}):
        with pytest.raises(UnsupportedError, match="extra config"):
            options(wrong)


def test_every_layout_and_engine_has_a_method():
    """By the files' text: the engines themselves are not here."""
    serving = Path(open_converted.__code__.co_filename).parent
    for layout in LAYOUTS:
        for engine in layout.engines:
            text = (serving / f"{engine.name}_methods.py").read_text()
            assert f'"{layout.id}"' in text
            assert engine.backend in text


def test_a_parameter_of_another_module_is_none_of_the_experts(directory):
    """vLLM registers the gate's correction bias on its experts too (DeepSeek-V3, Nemotron-H)."""
    module = Experts()
    module.register("e_score_correction_bias", 4)
    check_coverage(assigned(directory, module))
