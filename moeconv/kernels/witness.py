"""What do others make of the same source? The engines' own words, and none of our verbs.

A recipe, the kernel that carries it out and its inverse hang together: a fault in a verb undoes
itself. These functions take what a checkpoint holds of one expert, and give what an engine holds
then: by FlashInfer's own functions where there are any, and otherwise in plain torch, after what
vLLM 0.33.0 and SGLang 0.5.23 do on a GPU. `halves` are gate and up, or a single matrix, each
`[rows, bytes a row]` with the engine's padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from moeconv.layouts.verbs import K_BLOCK_BYTES, MarlinRows, MarlinWeight

if TYPE_CHECKING:
    import torch

    from moeconv.tensors import Bytes

    Dtype: TypeAlias = Literal["bfloat16", "float16"]
    Order: TypeAlias = Literal["wide", "single", "bias"]

_EPILOGUE_TILE = 128
"""vLLM 0.33.0, `convert_moe_weights_to_flashinfer_trtllm_block_layout`."""

_EXPONENT_BIAS = {"bfloat16": 126, "float16": 14}
"""vLLM 0.33.0 and SGLang 0.5.23, `nvfp4_marlin_process_global_scale`."""

_TILE_BYTES = 8
_NAN_IMAGE = 0xFF
"""The high byte of CUDA's NaN, shifted as the scales are; the CPU has another one."""


def trtllm_blocks(halves: Sequence[Bytes]) -> Bytes:
    """Call FlashInfer 0.7.4's public functions in the order in which vLLM 0.33.0 does.

    Raises
    ------
    ImportError
        FlashInfer is not installed, or lacks the functions.
    """
    import torch
    from flashinfer import reorder_rows_for_gated_act_gemm, shuffle_matrix_a
    from flashinfer.fused_moe import convert_to_block_layout

    rows = torch.cat([torch.from_numpy(half) for half in reversed(halves)])
    if len(halves) > 1:
        rows = reorder_rows_for_gated_act_gemm(rows)
    blocks = convert_to_block_layout(shuffle_matrix_a(rows, _EPILOGUE_TILE), K_BLOCK_BYTES)
    return _flat(blocks)


def marlin_weight(halves: Sequence[Bytes]) -> Bytes:
    """Repack 4-bit weights, two a byte: `gptq_marlin_repack` by its definition.

    Raises
    ------
    ImportError
        Torch is not installed.
    """
    from moeconv.kernels.reference import ReferenceKernels

    source, (rows, row_bytes) = np.concatenate(halves), halves[0].shape
    verb = MarlinWeight(rows, len(halves), row_bytes // _TILE_BYTES, stored=False)
    out = np.empty(source.size, np.uint8)
    ReferenceKernels().lay_out(verb, source, out)
    return out


def marlin_rows(halves: Sequence[Bytes], item_bytes: int) -> Bytes:
    """Permute block scales (items of one byte), or biases (of two), `[rows, groups]`.

    `marlin_permute_scales`, with every four columns reordered, and `marlin_permute_bias`.

    Raises
    ------
    ImportError
        Torch is not installed.
    """
    from moeconv.kernels.reference import ReferenceKernels

    source, (rows, row_bytes) = np.concatenate(halves), halves[0].shape
    groups = row_bytes // item_bytes
    order: Order = "bias" if item_bytes > 1 else "wide" if groups > 1 else "single"
    verb = MarlinRows(rows, len(halves), groups, item_bytes, order, stored=False)
    out = np.empty(source.size, np.uint8)
    ReferenceKernels().lay_out(verb, source, out)
    return out


def nvfp4_scales(scales: Bytes, factor: float, *, flushes: bool) -> Bytes:
    """Turn E4M3 bytes into S0E5M3 ones, in floating point: `nvfp4_marlin_process_scales`.

    Parameters
    ----------
    scales
        Block scales of one matrix.
    factor
        The power of two that is taken out of the layer's.
    flushes
        What has no normal form becomes zero, as under vLLM; under SGLang it does not.

    Raises
    ------
    ImportError
        Torch is not installed.
    """
    import torch

    source = torch.from_numpy(np.ascontiguousarray(scales)).view(torch.float8_e4m3fn)
    half = (source.float() * factor).half() * 2**7
    if flushes:
        half[half < 2] = 0  # noqa: PLR2004  (as the engine has it)
    image = half.view(torch.int16) << 1
    found = (image >> 8 & 0xFF).to(torch.uint8)
    found[half.isnan()] = _NAN_IMAGE
    return found.numpy()


def rescaled(scales: Bytes, ratio: float) -> Bytes:
    """Multiply E4M3 bytes by a ratio, to the nearest, of two as near the even one.

    Raises
    ------
    ImportError
        Torch is not installed.
    """
    import torch

    known = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    away = (every.abs()[:, None] * ratio - known).abs()
    # Of the nearest, whose distances are equal, an odd byte stands behind an even one.
    is_odd = torch.arange(0x7F) % 2
    ranked = torch.where(away == away.min(dim=1, keepdim=True).values, is_odd, 2)
    table = ranked.argmin(dim=1) | torch.arange(256) & 0x80
    table[every.isnan()] = torch.arange(256)[every.isnan()]
    return table.to(torch.uint8).numpy()[scales]


def power_bytes(scales: Bytes, item_bytes: int) -> Bytes:
    """Turn block scales that are floats into exponent bytes, by torch's own cast.

    Raises
    ------
    ImportError
        Torch is not installed.
    """
    import torch

    wide = torch.float32 if item_bytes == torch.float32.itemsize else torch.bfloat16
    powers = torch.from_numpy(np.ascontiguousarray(scales)).view(wide)
    return powers.to(torch.float8_e8m0fnu).view(torch.uint8).numpy()


def marlin_global(scale: float, factor: float, dtype: Dtype, *, rounds: bool) -> Bytes:
    """Return the global scale that Marlin multiplies with.

    Parameters
    ----------
    scale
        The one of the source, a float32.
    factor
        The power of two that is taken out of the layer's block scales.
    dtype
        What the engine computes in.
    rounds
        It is kept in that dtype, as under SGLang; under vLLM it is a float32.

    Raises
    ------
    ImportError
        Torch is not installed.
    """
    import torch

    kept = torch.float32 if not rounds else getattr(torch, dtype)
    value = torch.tensor([scale], dtype=torch.float32).to(kept)
    return _flat(value * 2.0 ** (_EXPONENT_BIAS[dtype] - 7) / factor)


def layer_factor(largest: int) -> float:
    """Return the power of two that vLLM takes out, by a layer's largest E4M3 byte above zero.

    `_nvfp4_compute_scale_factor`.

    Raises
    ------
    ImportError
        Torch is not installed.
    """
    import torch

    scale = torch.tensor([largest], dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    most = torch.finfo(torch.float8_e4m3fn).max
    return float((most / scale).log2().floor().exp2()) if 0 < scale < most else 1.0


def _flat(tensor: torch.Tensor) -> Bytes:
    import torch

    flat: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat
