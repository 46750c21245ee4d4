"""Measure the GPU kernels, whole layers at a time, for the page on performance.

Usage: `python docs/figures/kernels.py FIGURES.json`, on a machine with a CUDA device. Where vLLM
and FlashInfer are installed, what the engine does with the same layer is measured beside ours.
"""

from __future__ import annotations

import datetime as dt
import gc
import json
import platform
import sys
import time
import types
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from moeconv.kernels.cuda import CudaKernels
from moeconv.kernels.timing import Move, median_seconds, time_copy, time_kernels
from moeconv.kernels.torch import TorchBatch
from moeconv.kernels.triton import TritonBatch
from moeconv.layouts import find_layout
from moeconv.layouts.layout import Facts, Geometry, Layout, Output, Slice

DEVICE: Final = torch.device("cuda:0")
TRITON: Final = CudaKernels("cuda:0", TritonBatch)
TORCH: Final = CudaKernels("cuda:0", TorchBatch)
FACTS: Final = Facts((1.0, 1.0), scales=0, flushed=0, negative=0, differing=0)
ENGINE_REPEATS: Final = 5

SHAPES: Final = {
    "Qwen3-30B-A3B": Geometry(128, 2048, 768, gated=True),
    "Qwen3-235B-A22B": Geometry(128, 4096, 1536, gated=True),
    "gpt-oss-120b": Geometry(128, 2880, 2880, gated=True, order="pairs"),
    "DeepSeek-V3": Geometry(256, 7168, 2048, gated=True),
    "Kimi-K2": Geometry(384, 7168, 2048, gated=True),
}
"""One layer's routed experts. FP4 is NVFP4, and MXFP4 for gpt-oss."""

PARTS: Final = {
    "BF16": ("trtllm-bf16", "trtllm-bf16", ("weight",)),
    "FP4 weights": ("marlin-nvfp4", "marlin-mxfp4-gptoss", ("weight",)),
    "FP4 scales": ("marlin-nvfp4", "marlin-mxfp4-gptoss", ("weight_scale",)),
    "FP4 layer": (
        "marlin-nvfp4",
        "marlin-mxfp4-gptoss",
        ("weight", "weight_scale", "global_scale", "bias"),
    ),
}
"""The layout, that of gpt-oss, and which parts of a stored matrix."""


def moves(layout: Layout, outputs: list[Output]) -> tuple[Move, ...]:
    """Return what one expert's outputs ask of a kernel."""
    return tuple(
        Move(layout.bind(output, FACTS, 0), output.matrix.shape, output.spec.nbytes)
        for output in outputs
    )


def measure(name: str, part: str) -> dict[str, Any]:
    """Measure one part of one layer: bytes, and GB/s read and written by each way."""
    geometry = SHAPES[name]
    *ids, kinds = PARTS[part]
    layout = find_layout(ids[geometry.order == "pairs"])
    cuts = Slice(0, geometry.intermediate), layout.rank_slice(geometry, 1, 0)
    stored, final = (
        moves(layout, [o for o in layout.outputs(geometry, cut) if o.matrix.part in kinds])
        for cut in cuts
    )
    timings = {
        "triton": time_kernels(TRITON, stored, geometry.experts),
        "triton engine order": time_kernels(TRITON, final, geometry.experts),
        "triton inverse": time_kernels(TRITON, stored, geometry.experts, back=True),
        "torch": time_kernels(TORCH, stored, geometry.experts),
    }
    timings["copy"] = time_copy("cuda:0", timings["triton"].nbytes)
    row: dict[str, Any] = {
        "shape": name,
        "part": part,
        "layout": layout.id,
        "experts": geometry.experts,
    }
    row["nbytes"] = timings["triton"].nbytes
    row["gb_per_s"] = {way: round(t.bytes_per_s / 1e9, 1) for way, t in timings.items()}
    return row


def engine_ways() -> dict[str, Callable[[Geometry], Iterator[tuple[str, int, float]]]]:
    """Return what vLLM does with a layer: parts, the bytes read and written, and seconds."""
    # Imported first, since `flashinfer_utils` alone is a circular import.
    import vllm.model_executor.layers.fused_moe  # noqa: F401
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.utils import flashinfer_utils, marlin_utils_fp4

    def seconds(run: Callable[[], object]) -> float:
        with set_current_vllm_config(VllmConfig()):
            return median_seconds(run, DEVICE, ENGINE_REPEATS)

    def bf16(geometry: Geometry) -> Iterator[tuple[str, int, float]]:
        E, H, n = geometry.experts, geometry.hidden, -(-geometry.intermediate // 128) * 128
        w13, w2 = (items(torch.bfloat16, shape) for shape in ((E, 2 * n, H), (E, H, n)))
        convert = flashinfer_utils.convert_moe_weights_to_flashinfer_trtllm_block_layout
        kept: dict[Any, Any] = {}  # row maps, as vLLM keeps them from layer to layer
        run = seconds(lambda: convert(kept, w13, w2, is_gated_act_gemm=True))
        yield "BF16", 4 * (w13.numel() + w2.numel()), run

    def fp4(geometry: Geometry) -> Iterator[tuple[str, int, float]]:
        is_mx = geometry.order == "pairs"
        group, pads = (32, (256, 128)) if is_mx else (16, (1, 128))
        E = geometry.experts
        H, I = (
            -(-size // pad) * pad
            for size, pad in zip((geometry.hidden, geometry.intermediate), pads, strict=True)
        )
        w13, w2 = (items(torch.uint8, shape) for shape in ((E, 2 * I, H // 2), (E, H, I // 2)))
        nbytes = 2 * (w13.numel() + w2.numel())
        repack = marlin_utils_fp4._repack_marlin_experts  # noqa: SLF001
        both = seconds(
            lambda: (repack(w13, 2 * I, H, is_a_8bit=False), repack(w2, H, I, is_a_8bit=False))
        )
        yield "FP4 weights", nbytes, both
        scales = [((E, 2 * I, H // group)), (E, H, I // group)]
        nbytes += 2 * sum(E * rows * groups for E, rows, groups in scales)
        if is_mx:
            s13, s2 = (torch.randint(119, 122, s, dtype=torch.uint8, device=DEVICE) for s in scales)
            b13, b2 = (items(torch.bfloat16, shape) for shape in ((E, 2 * I), (E, H)))
            layer = types.SimpleNamespace(params_dtype=torch.bfloat16)
            prepare = marlin_utils_fp4.prepare_moe_mxfp4_layer_for_marlin
            whole = seconds(lambda: prepare(layer, w13, w2, s13, s2, b13, b2))
            nbytes += 4 * (b13.numel() + b2.numel())
        else:
            s13, s2 = (
                (torch.rand(s, device=DEVICE) * 384 + 64).to(torch.float8_e4m3fn) for s in scales
            )
            g13, g2 = (torch.full((E,), 4e-5, device=DEVICE) for _ in range(2))
            layer = types.SimpleNamespace(
                num_experts=E,
                hidden_size=H,
                intermediate_size_per_partition=I,
                params_dtype=torch.bfloat16,
            )
            prepare = marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin
            whole = seconds(lambda: prepare(layer, w13, s13, g13, w2, s2, g2, is_act_and_mul=True))
        yield "FP4 layer", nbytes, whole

    return {"BF16": bf16, "FP4": fp4}


def items(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random bits as a tensor."""
    *leading, last = shape
    nbytes = (*leading, last * dtype.itemsize)
    return torch.randint(0, 256, nbytes, dtype=torch.uint8, device=DEVICE).view(dtype)


def installed(package: str) -> str:
    """Return a package's version, or an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def release() -> None:
    """Give memory back before the next layer.

    The driver wipes it behind our back: for a fifth of a second after 90 GB, a tenth slower.
    """
    gc.collect()
    torch.cuda.empty_cache()
    time.sleep(1)


def main() -> None:
    """Measure everything and write the figures."""
    rows = []
    for name in SHAPES:
        for part in PARTS:
            rows.append(measure(name, part))
            release()
            print(json.dumps(rows[-1]), flush=True)
    try:
        engine = engine_ways()
    except ImportError as error:
        print(f"without vLLM: {error}")
        engine = {}
    for name, geometry in SHAPES.items():
        for way in engine.values():
            for part, nbytes, seconds in way(geometry):
                row = next(row for row in rows if (row["shape"], row["part"]) == (name, part))
                row["gb_per_s"]["vllm"] = round(nbytes / seconds / 1e9, 1)
                print(name, part, row["gb_per_s"], flush=True)
            release()
    figures = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": "python docs/figures/kernels.py FIGURES.json",
        "gpu": torch.cuda.get_device_name(DEVICE),
        "versions": {
            "python": platform.python_version(),
            **{name: installed(name) for name in ("torch", "triton", "vllm")},
        },
        "rows": rows,
    }
    Path(sys.argv[1]).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
