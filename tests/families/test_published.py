"""Forms that are published and that transformers does not write: renamed and stacked from its own.

A form is right if the converted bytes are those of the form that transformers wrote, which another
test compares with the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeconv.kernels.cpu import CpuKernels
from moeconv.verification.verify import verify
from tests import runs

Tensors: TypeAlias = dict[str, torch.Tensor]
Written: TypeAlias = Callable[[str], tuple[Path, Any]]


def stack(tensors: Tensors) -> Tensors:
    """Stack an expert a tensor to `[E, 2I, H]` and `[E, H, I]`."""
    stacked = dict(tensors)
    for name in tensors:
        match = re.fullmatch(r"(.+\.experts)\.0\.down_proj\.weight", name)
        if match:
            parts: dict[str, list[torch.Tensor]] = {}
            for part in ("gate_proj", "up_proj", "down_proj"):
                names = (f"{match[1]}.{e}.{part}.weight" for e in range(4))
                parts[part] = [stacked.pop(each) for each in names]
            gates_ups = zip(parts["gate_proj"], parts["up_proj"], strict=True)
            stacked[f"{match[1]}.gate_up_proj"] = torch.stack([torch.cat(two) for two in gates_ups])
            stacked[f"{match[1]}.down_proj"] = torch.stack(parts["down_proj"])
    return stacked


def unstack(tensors: Tensors) -> Tensors:
    """Give every expert of Step's three stacks a tensor of its own."""
    apart: Tensors = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+\.moe)\.(gate|up|down)_proj\.weight", name)
        if match:
            for e, each in enumerate(tensor):
                apart[f"{match[1]}.experts.{e}.{match[2]}_proj.weight"] = each.contiguous()
        else:
            apart[name] = tensor
    return apart


def transpose(tensors: Tensors) -> Tensors:
    """Transpose stacks to `[E, H, 2I]` and `[E, I, H]`."""
    return {
        name: tensor.mT.contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in tensors.items()
    }


def rename(old: str, new: str) -> Callable[[Tensors], Tensors]:
    """Change the heads of names."""
    return lambda tensors: {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in tensors.items()
    }


def without_zero_experts(tensors: Tensors) -> Tensors:
    """Leave out what transformers makes up for experts that have no weights."""
    return {name: t for name, t in tensors.items() if not re.search(r"experts\.[45]\.", name)}


def same(tensors: Tensors) -> Tensors:
    return tensors


@pytest.mark.parametrize(
    ("name", "change", "config", "remove"),
    [
        pytest.param("qwen3_5_moe", stack, {}, (), id="qwen3.5-stacked"),
        pytest.param("qwen3_5_moe_text", stack, {}, (), id="qwen3.5-text-stacked"),
        pytest.param(
            "qwen3_moe", stack, {"num_experts": 4}, ("num_local_experts",), id="qwen3-stacked"
        ),
        pytest.param("qwen3_vl_moe", transpose, {}, (), id="qwen3-vl-transposed"),
        pytest.param(
            "deepseek_v4",
            rename("model.layers.", "layers."),
            {},
            ("mlp_layer_types",),
            id="deepseek-v4",
        ),
        pytest.param(
            "deepseek_v3", same, {"model_type": "kimi_k2", "moe_layer_freq": 1}, (), id="kimi-k2"
        ),
        pytest.param(
            "kimi_k25", rename("language_model.model.", "language_model."), {}, (), id="kimi-k2.5"
        ),
        pytest.param(
            "kimi_linear",
            rename("model.layers.0.block_sparse_moe.", "model.layers.0.mlp."),
            {"first_k_dense_replace": 1, "moe_layer_freq": 1},
            ("mlp_layer_types",),
            id="kimi-linear",
        ),
        pytest.param(
            "nemotron_h",
            same,
            {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4},
            ("layers_block_type",),
            id="nemotron-h",
        ),
        pytest.param("longcat_flash", without_zero_experts, {}, (), id="longcat-flash"),
        pytest.param(
            "step3p7", unstack, {"moe_layers_enum": "1"}, ("mlp_layer_types",), id="step3.5-apart"
        ),
        pytest.param(
            "minimax_m3_vl", same, {"moe_layer_freq": [0, 1]}, ("mlp_layer_types",), id="minimax-m3"
        ),
        pytest.param(
            "glm4_moe_lite", same, {"first_k_dense_replace": 1}, ("mlp_layer_types",), id="glm-lite"
        ),
        pytest.param(
            "hunyuan_v1_moe",
            same,
            {"num_experts": [4, 4], "moe_intermediate_size": [192, 192]},
            (),
            id="hunyuan-lists",
        ),
        pytest.param(
            "qwen3_omni_moe_thinker", rename("model.", "thinker.model."), {}, (), id="qwen3-omni"
        ),
    ],
)
def test_published_form_becomes_the_same_bytes(
    name: str,
    change: Callable[[Tensors], Tensors],
    config: dict[str, Any],
    remove: tuple[str, ...],
    written: Written,
    tmp_path: Path,
) -> None:
    source, _ = written(name)
    published = tmp_path / "published"
    publish(source, published, change, config, remove)
    if change is not same:
        assert header(published) != header(source)
    out = runs.run(published, tmp_path / "out")
    list(verify(out, CpuKernels(), source=published))
    assert runs.rank_bytes(out) == runs.rank_bytes(runs.run(source, tmp_path / "as-written"))


def publish(
    source: Path,
    root: Path,
    change: Callable[[Tensors], Tensors],
    config: dict[str, Any],
    remove: tuple[str, ...],
) -> None:
    """Write the checkpoint anew, with other tensors and other keys in the text config."""
    root.mkdir()
    save_file(change(load(source)), root / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((source / "config.json").read_text())
    text = said.get("text_config", said)
    text.update(config)
    for key in remove:
        del text[key]
    (root / "config.json").write_text(json.dumps(said))


def load(root: Path) -> Tensors:
    files = sorted(root.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def header(root: Path) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in load(root).items()}
