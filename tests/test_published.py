"""Checkpoints that no one here wrote: `save_pretrained`, then convert, verify, and read a rank."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from moeconv.checkpoint.index import open_checkpoint
from moeconv.kernels.cpu import CpuKernels
from moeconv.verification.digests import Subset
from moeconv.verification.verify import Verified, verify
from tests import published, runs
from tests.sources import Tensor, write_checkpoint

pytest.importorskip("transformers", reason="the extra `dev` brings it")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """Write each kind once."""
    root = tmp_path_factory.mktemp("published")

    def save(kind: str, max_shard_size: str = "150kB") -> Path:
        if not (root / kind).exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what transformers warns of is its own business
                published.write(kind, root / kind, max_shard_size)
        return root / kind

    return save


def tensors(root: Path) -> dict[str, Tensor]:
    return {
        ref.name: (
            ref.spec.dtype,
            ref.spec.shape,
            (root / ref.file).read_bytes()[ref.begin : ref.begin + ref.spec.nbytes],
        )
        for ref in open_checkpoint(root).tensors.values()
    }


@pytest.mark.parametrize("kind", published.KINDS)
def test_it_converts_and_comes_back(saved, tmp_path, kind):
    source = saved(kind)
    assert len(list(source.glob("*.safetensors"))) > 5, "the projections share a shard"
    out = runs.run(source, tmp_path / "out")
    *_, result = verify(out, CpuKernels(), read_data=Subset(), source=source)
    assert isinstance(result, Verified)
    assert result.sources == len(open_checkpoint(source).tensors)
    plan, checkpoint = runs.plan(source)
    sizes = {
        (s.geometry.experts, s.geometry.hidden, s.geometry.intermediate, s.geometry.gated)
        for s in plan.stacks
    }
    assert sizes == {(4, 256, 192, kind != "nemotron_h")}
    experts = {name for name in checkpoint.tensors if is_expert(name)}
    assert {name for stack in plan.stacks for name in stack.names} == experts


def is_expert(name: str) -> bool:
    return bool(re.search(r"\.experts\.|block_sparse_moe\.(input|output)_linear", name))


def test_the_kinds_are_the_storages_they_stand_for(saved):
    shapes = {
        kind: {n: t[1] for n, t in tensors(saved(kind)).items() if is_expert(n)}
        for kind in published.KINDS
    }
    assert shapes["granitemoe"]["model.layers.0.block_sparse_moe.input_linear.weight"] == (
        4,
        384,
        256,
    )
    assert shapes["llama4_text"]["model.layers.1.feed_forward.experts.gate_up_proj"] == (
        4,
        256,
        384,
    )
    assert (192, 256) in shapes["qwen3_moe"].values()
    assert not [name for name in shapes["nemotron_h"] if "gate_proj" in name]


def test_per_expert_and_stacked_are_one_model(saved, tmp_path):
    """Qwen3.5 as transformers saves it, and restacked to the published `[E, 2I, H]`."""
    source = saved("qwen3_5_moe_text")
    held = tensors(source)
    prefixes = {name.split(".experts.")[0] + ".experts" for name in held if ".experts." in name}
    others = {name: tensor for name, tensor in held.items() if ".experts." not in name}
    per_expert, stacked = dict(others), dict(others)
    for prefix in prefixes:
        gate_up, down = experts_of(held, prefix)
        stacked[f"{prefix}.gate_up_proj"] = ("BF16", gate_up.shape, gate_up.tobytes())
        stacked[f"{prefix}.down_proj"] = ("BF16", down.shape, down.tobytes())
        for e in range(4):
            for name, matrix in (
                ("gate_proj", gate_up[e, :192]),
                ("up_proj", gate_up[e, 192:]),
                ("down_proj", down[e]),
            ):
                per_expert[f"{prefix}.{e}.{name}.weight"] = ("BF16", matrix.shape, matrix.tobytes())
    config = json.loads((source / "config.json").read_text())
    read = []
    for name, table in (("apart", per_expert), ("stacked", stacked)):
        root = write_checkpoint(tmp_path / name, table, config, shards=3)
        out = runs.run(root, tmp_path / f"{name}.out")
        assert list(verify(out, CpuKernels(), read_data=Subset(), source=root))
        read.append(runs.rank_bytes(out, tp=3, rank=2))
    assert (
        read[0]
        == read[1]
        == runs.rank_bytes(runs.run(source, tmp_path / "saved.out"), tp=3, rank=2)
    )


def experts_of(held: dict[str, Tensor], prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Return `[E, 2I, H]` and `[E, H, I]`, from whichever way they are stored."""

    def array(name: str) -> np.ndarray:
        _, shape, data = held[f"{prefix}.{name}"]
        return np.frombuffer(data, np.uint16).reshape(shape)

    if f"{prefix}.gate_up_proj" in held:
        return array("gate_up_proj"), array("down_proj")
    gate_up = [
        np.concatenate([array(f"{e}.gate_proj.weight"), array(f"{e}.up_proj.weight")])
        for e in range(4)
    ]
    return np.stack(gate_up), np.stack([array(f"{e}.down_proj.weight") for e in range(4)])


def test_the_config_still_loads(saved, tmp_path):
    from transformers import AutoConfig

    out = runs.run(saved("qwen3_moe"), tmp_path / "out")
    assert AutoConfig.from_pretrained(out).num_experts == 4


def test_transformers_finds_no_weights_in_it(saved, tmp_path):
    from transformers import AutoModelForCausalLM

    out = runs.run(saved("qwen3_moe"), tmp_path / "out")
    with pytest.raises(OSError, match=r"no file named"):
        AutoModelForCausalLM.from_pretrained(out)
