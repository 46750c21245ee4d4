"""Checkpoints that other libraries packed, against what those libraries unpack them to.

compressed-tensors and transformers are dev dependencies. nvidia-modelopt is not (its export needs
older transformers on paper, and dozens of packages): its test runs where it is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import runs
from tests.fp4.held import Held, held
from tests.fp4.models import PROJECTIONS, Model
from tests.sources import write_checkpoint

# They warn of each other's versions, and of what is no part of a test.
pytestmark = pytest.mark.filterwarnings("ignore")

HIDDEN, INTERMEDIATE, EXPERTS = 256, 192, 4
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def qwen(torch: Any) -> Any:
    """A tiny Qwen3-MoE of transformers, in BF16."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        intermediate_size=384,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        architectures=["Qwen3MoeForCausalLM"],
    )
    return transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()


def packed(tensor: Any, torch: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return a tensor as a shard holds it."""
    code = {
        torch.uint8: "U8",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float32: "F32",
        torch.bfloat16: "BF16",
    }[tensor.dtype]
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return code, tuple(tensor.shape), raw


def converted(source: Path, out: Path, kind: str) -> Held:
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
    runs.invoke("verify", out, "--read-data", "--source", source)
    return held(Model(kind, EXPERTS, HIDDEN, INTERMEDIATE, layers=1), out)


class Packer:
    """compressed-tensors' own scales, packing and unpacking, for a preset of its own."""

    def __init__(self, preset: str, torch: Any) -> None:
        quantization = pytest.importorskip("compressed_tensors.quantization")
        compressors = pytest.importorskip("compressed_tensors.compressors")
        self._helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
        self._fp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
        self._scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
        kind = "nvfp4" if preset.startswith("NVFP4") else "mxfp4"
        registry = compressors.BaseCompressor
        self._compressor = registry.get_value_from_registry(f"{kind}-pack-quantized")
        self._torch = torch
        self.is_nvfp4 = kind == "nvfp4"

    def pack(self, weight: Any, whole: Any) -> dict[str, Any]:
        """Pack a matrix, with the global scale of `whole`."""
        state = {"weight": weight}
        if self.is_nvfp4:
            low, high = whole.float().min(), whole.float().max()
            state["weight_global_scale"] = self._helpers.generate_gparam(low, high)
        weights = self._scheme.weights
        blocks = weight.float().unflatten(-1, (-1, weights.group_size))
        scale, _ = self._helpers.calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), weights, state.get("weight_global_scale")
        )
        packed = self._compressor.compress({**state, "weight_scale": scale}, self._scheme)
        return dict(packed)

    def unpack(self, state: dict[str, Any]) -> Any:
        """Unpack a matrix without rounding, and see that theirs is that, rounded."""
        rows, cols = state["weight_packed"].shape
        codes = self._fp4.unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * cols).double()
        scale = state["weight_scale"]
        if self.is_nvfp4:
            scale = scale.double() / state["weight_global_scale"].double()
        else:
            one = self._torch.ones((), dtype=self._torch.float64)
            scale = self._torch.ldexp(one, scale.int() - 127)
        values = (codes * scale.repeat_interleave(2 * cols // scale.shape[1], 1)).numpy()
        theirs = self._compressor.decompress(state, self._scheme)["weight"]
        np.testing.assert_allclose(theirs.double().numpy(), values, rtol=0.02)
        return values


@pytest.mark.parametrize(
    ("preset", "shared"),
    [("NVFP4A16", True), ("NVFP4", True), ("NVFP4A16", False), ("MXFP4A16", True)],
)
def test_what_compressed_tensors_packs(
    preset: str, shared: bool, torch: Any, tmp_path: Path
) -> None:
    """With one global scale for gate and up, as llm-compressor sees to, or one each."""
    packer, model = Packer(preset, torch), qwen(torch)
    tensors, expected = {}, {}
    for key, tensor in model.state_dict().items():
        if ".experts." not in key:
            tensors[key] = packed(tensor, torch)
    module = model.model.layers[0].mlp.experts
    for expert in range(EXPERTS):
        both, down = module.gate_up_proj[expert].detach(), module.down_proj[expert].detach()
        states = [
            packer.pack(weight, both if shared and weight is not down else weight)
            for weight in (*both.chunk(2), down)
        ]
        for projection, state in zip(PROJECTIONS, states, strict=True):
            values = packer.unpack(state)
            if not shared and projection == "up":  # the engine's way: gate's scale for both
                scale, gate = (s["weight_global_scale"].double() for s in (state, states[0]))
                assert scale != gate
                values *= float(scale / gate)
            expected[expert, projection] = values
            if preset == "NVFP4":
                state["input_global_scale"] = torch.tensor([3.0])
            stem = f"model.layers.0.mlp.experts.{expert}.{projection}_proj"
            tensors.update(
                {f"{stem}.{part}": packed(value, torch) for part, value in state.items()}
            )

    config = {**json.loads(model.config.to_json_string()), "dtype": "bfloat16"}
    source = write_checkpoint(tmp_path / "source", tensors, config, shards=2)
    read = converted(source, tmp_path / "out", "ct" if packer.is_nvfp4 else "ct-mxfp4")
    for (expert, projection), values in expected.items():
        found = read.values(0, expert)[projection]
        # A reciprocal of a float32 is half a unit in the last place off; powers of two are not.
        np.testing.assert_allclose(found, values, rtol=1e-6 if packer.is_nvfp4 else 0)


def quantise_mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise by the OCP MX recipe: the block's largest exponent, less that of 6."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = weight.reshape(*weight.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(axis=-1)
    exponent = np.floor(np.log2(np.maximum(largest, 2.0**-120))).astype(int) - 2
    scaled = blocks / np.ldexp(1.0, exponent)[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - values).argmin(axis=-1) | (scaled < 0) << 3
    codes = codes.astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).astype(np.uint8)


def test_gpt_oss_is_what_transformers_unpacks(torch: Any, tmp_path: Path) -> None:
    """A model of transformers, its experts quantised here, decoded there."""
    transformers = pytest.importorskip("transformers")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **SIZES, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS
    )
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    from safetensors.torch import load_file

    tensors, theirs = {}, {}
    for name, tensor in load_file(tmp_path / "bf16" / "model.safetensors").items():
        if ".experts." not in name or name.endswith("_bias"):
            tensors[name] = packed(torch.randn_like(tensor) if "bias" in name else tensor, torch)
            continue
        weight = tensor.float().transpose(1, 2).contiguous().numpy()  # [E, in, out] in BF16
        blocks, scales = quantise_mxfp4(weight)
        tensors[f"{name}_blocks"] = ("U8", blocks.shape, blocks.tobytes())
        tensors[f"{name}_scales"] = ("U8", scales.shape, scales.tobytes())
        unpacked = mxfp4.convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales)
        )
        theirs[name.rsplit(".", 1)[1]] = unpacked.transpose(1, 2).double().numpy()
        assert np.sqrt(((unpacked.transpose(1, 2).float().numpy() - weight) ** 2).mean()) < 0.2 * (
            weight.std()
        )
    saved = json.loads((tmp_path / "bf16" / "config.json").read_text())
    saved["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    source = write_checkpoint(tmp_path / "source", tensors, saved, shards=2)
    read = converted(source, tmp_path / "out", "gptoss")
    for expert in range(EXPERTS):
        found = read.values(0, expert)
        np.testing.assert_array_equal(found["gate"], theirs["gate_up_proj"][expert, 0::2])
        np.testing.assert_array_equal(found["up"], theirs["gate_up_proj"][expert, 1::2])
        np.testing.assert_array_equal(found["down"], theirs["down_proj"][expert])


def test_what_modelopt_exports(torch: Any, tmp_path: Path) -> None:
    """Calibrated and exported on a CPU, from its own quantiser to its own unpacking."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    export = pytest.importorskip("modelopt.torch.export")
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    from safetensors.torch import load_file

    source = tmp_path / "source"
    model = mtq.quantize(
        qwen(torch),
        mtq.NVFP4_DEFAULT_CFG,
        lambda model: [model(torch.randint(0, 256, (2, 16))) for _ in range(2)],
    )
    export.export_hf_checkpoint(model, export_dir=source)
    config = json.loads((source / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4"
    tensors = load_file(source / "model.safetensors")
    read = converted(source, tmp_path / "out", "modelopt")
    for expert in range(EXPERTS):
        for projection, found in read.values(0, expert).items():
            stem = f"model.layers.0.mlp.experts.{expert}.{projection}_proj"
            theirs = qtensor.NVFP4QTensor(found.shape, torch.float32, tensors[f"{stem}.weight"])
            expected = theirs.dequantize(
                torch.float32,
                scale=tensors[f"{stem}.weight_scale"],
                double_scale=tensors[f"{stem}.weight_scale_2"],
                block_sizes={-1: 16},
            )
            np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
