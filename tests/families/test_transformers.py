"""Every model type that transformers can write: converted, verified, compared with its weights."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from moeconv.checkpoint.index import open_checkpoint
from moeconv.errors import UnsupportedError
from moeconv.kernels.cpu import CpuKernels
from moeconv.planning.modelconfig import activation, renormalises
from moeconv.planning.recognition import pick_family
from moeconv.verification.digests import Subset
from moeconv.verification.verify import Verified, verify
from tests import runs
from tests.families import tiny
from tests.families.unshuffle import read_expert

if TYPE_CHECKING:
    import torch

REFUSED = {
    "gpt_oss": r"stored in no scheme that is known: .*, `down_proj_bias` BF16",
    "ernie4_5_vl_moe": r"its text experts and its vision experts in one row",
}
"""Model types that `trtllm-bf16` does not take, and words of the refusal."""


@pytest.mark.parametrize("name", [name for name in tiny.MODEL_TYPES if name not in REFUSED])
def test_converted_is_what_transformers_computes_with(
    name: str, written: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    source, model = written(name)
    out = runs.run(source, tmp_path / "out")
    *_, verified = verify(out, CpuKernels(), read_data=Subset(), source=source)
    assert isinstance(verified, Verified)
    assert verified.sources > 0

    plan, checkpoint = runs.plan(source)
    stack = plan.stacks[-1]
    modules = expert_modules(model)
    assert [stack.layer for stack in plan.stacks] == sorted(modules)
    module = modules[stack.layer]
    found: dict[str, np.ndarray] = {}
    expert = 0
    for expert in (0, stack.geometry.experts - 1):
        found = read_expert(
            out,
            stack.prefix,
            expert,
            intermediate=stack.geometry.intermediate,
            gated=stack.geometry.gated,
        )
        expected = weights(module, expert, stack.geometry.hidden)
        assert found.keys() == expected.keys()
        for projection, weight in expected.items():
            np.testing.assert_array_equal(found[projection], bits(weight), projection)
    check_function(module, expert, found, activation(plan.family, checkpoint.config))


@pytest.mark.parametrize(("name", "words"), REFUSED.items())
def test_refused_in_words(
    name: str, words: str, written: Callable[[str], tuple[Path, Any]]
) -> None:
    source, _ = written(name)
    with pytest.raises(UnsupportedError, match=words):
        runs.plan(source)


@pytest.mark.parametrize("name", tiny.MODEL_TYPES)
def test_renormalising_is_known(name: str, written: Callable[[str], tuple[Path, Any]]) -> None:
    checkpoint = open_checkpoint(written(name)[0])
    assert renormalises(pick_family(checkpoint), checkpoint.config) is not None


def expert_modules(model: Any) -> dict[int, Any]:
    """Return the module that holds the routed experts of each layer."""
    found = {}
    for path, module in model.named_modules():
        params = dict(module.named_parameters(recurse=False))
        layer = re.search(r"layers\.(\d+)\.", path)
        if layer and params.get("down_proj") is not None and params["down_proj"].ndim == 3:
            found[int(layer[1])] = module
    return found


def weights(module: Any, expert: int, hidden: int) -> dict[str, torch.Tensor]:
    """Return gate, up and down as `[out, in]`; sizes differ, so a shape tells the axes."""
    down = module.down_proj[expert]
    first = (module.gate_up_proj if hasattr(module, "gate_up_proj") else module.up_proj)[expert]
    if down.shape[0] != hidden:
        down, first = down.T, first.T
    intermediate = down.shape[1]
    assert hidden not in {intermediate, 2 * intermediate}
    assert first.shape[1] == hidden
    names = ("up",) if len(first) == intermediate else ("gate", "up")
    return {"down": down, **dict(zip(names, first.split(intermediate), strict=True))}


def bits(weight: torch.Tensor) -> np.ndarray:
    import torch

    return weight.detach().contiguous().view(torch.int16).numpy()


def check_function(module: Any, expert: int, found: dict[str, np.ndarray], kind: str) -> None:
    """Compare what the module computes with what the converted weights and activation give."""
    import torch
    from torch.nn import functional

    act: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "silu": lambda gate, up: functional.silu(gate) * up,
        "relu2": lambda _, up: functional.relu(up) ** 2,
        "swigluoai": lambda gate, up: gate * torch.sigmoid(1.702 * gate) * (up + 1),
    }
    mine = {
        name: torch.from_numpy(weight.copy()).view(torch.bfloat16).float()
        for name, weight in found.items()
    }
    x = torch.randn(3, mine["down"].shape[0], generator=torch.Generator().manual_seed(expert))
    up = x @ mine["up"].T
    gate = x @ mine["gate"].T if "gate" in mine else up
    expected = act[kind](gate, up) @ mine["down"].T
    with torch.no_grad():
        actual = run_expert(module.float(), expert, x)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    module.bfloat16()


def run_expert(module: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    """Send every token to one expert, with weight one."""
    import torch

    count = module.down_proj.shape[0]
    if len(inspect.signature(module.forward).parameters) == 1:  # Llama 4: a row of tokens an expert
        rows = torch.zeros(count, *x.shape)
        rows[expert] = x
        return module(rows.flatten(0, 1)).view(count, *x.shape)[expert]  # type: ignore[no-any-return]
    chosen = torch.tensor([[expert, (expert + 1) % count]]).repeat(len(x), 1)
    weight = torch.tensor([[1.0, 0.0]]).repeat(len(x), 1)
    return module(x, chosen, weight)  # type: ignore[no-any-return]
