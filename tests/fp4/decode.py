"""Marlin bytes read by their definition: nothing here is shared with the code under test.

Weights: vLLM 0.33.0, `get_weight_perm(4)`, `marlin_permute_weights` and `marlin_weights` of
`marlin_utils_test`, undone. Scales: `get_scale_perms` and the reorder of every four, undone; an
S0E5M3 byte is an unsigned number with five bits of exponent (bias 15) and three of mantissa. The
kernel multiplies a FP4 value, whose exponent it leaves unbiased, by the block scale and the global
scale: hence the powers of two between the biases of FP4 and of the serving dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    Array: TypeAlias = np.ndarray

E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_TILE: Final = 16


def weight_perm() -> Array:
    """vLLM's `get_weight_perm(4)`, in its own words."""
    perm = []
    for i in range(32):
        perm1 = []
        col = i // 4
        for block in (0, 1):
            for row in (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1):
                perm1.append(16 * row + col + 8 * block)  # noqa: PERF401
        for j in range(4):
            perm.extend([p + 256 * j for p in perm1])
    interleave = [0, 2, 4, 6, 1, 3, 5, 7]
    return np.array(perm).reshape(-1, 8)[:, interleave].ravel()


def weight_codes(words: bytes, inputs: int, outputs: int) -> Array:
    """Return the FP4 codes `[outputs, inputs]` of one expert's int32 `[inputs/16, 2 outputs]`."""
    packed = np.frombuffer(words, np.uint32).reshape(inputs // _TILE, -1)
    codes = np.stack([packed >> 4 * i & 15 for i in range(8)], axis=-1).reshape(inputs // _TILE, -1)
    permuted = codes.reshape(-1, 1024)
    plain = np.empty_like(permuted)
    plain[:, weight_perm()] = permuted
    tiles = plain.reshape(inputs // _TILE, outputs // _TILE, _TILE, _TILE)
    return tiles.transpose(0, 2, 1, 3).reshape(inputs, outputs).T


def scale_bytes(data: bytes, groups: int, outputs: int) -> Array:
    """Return the scale bytes `[outputs, groups]` of one expert's `[groups, outputs]`."""
    many = [i + 8 * j for i in range(8) for j in range(8)]
    single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    perm = many if groups > 1 else single
    swapped = np.frombuffer(data, np.uint8).reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, len(perm))
    plain = np.empty_like(swapped)
    plain[:, perm] = swapped
    return plain.reshape(groups, outputs).T


def biases(data: bytes) -> Array:
    """Return the bits of one expert's biases in the order of rows."""
    single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    permuted = np.frombuffer(data, np.uint16).reshape(-1, 32)
    plain = np.empty_like(permuted)
    plain[:, single] = permuted
    return plain.reshape(-1)


def s0e5m3(scales: Array) -> Array:
    """Return the values of S0E5M3 bytes."""
    exponent, mantissa = (scales >> 3).astype(int), scales & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 15)
    return np.where(exponent > 0, normal, np.ldexp(mantissa / 8, -14))


def e4m3(scales: Array) -> Array:
    """Return the values of E4M3 bytes."""
    exponent, mantissa = (scales >> 3 & 15).astype(int), scales & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent > 0, normal, np.ldexp(mantissa / 8, -6))
    signed: Array = np.where(scales & 128, -value, value)
    return signed


def e8m0(scales: Array) -> Array:
    """Return the values of E8M0 bytes."""
    powers: Array = np.ldexp(1.0, scales.astype(int) - 127)
    return powers


def dequantised(codes: Array, scales: Array, scale: float = 1.0) -> Array:
    """Return `[outputs, inputs]` float64 values of codes and the values of their scales."""
    wide = np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)
    values: Array = E2M1[codes] * wide * scale
    return values


def nvfp4(
    words: bytes, scales: bytes, scale: float, inputs: int, outputs: int, *, fp16: bool = False
) -> Array:
    """Return what one expert's NVFP4 parameter stands for."""
    codes = weight_codes(words, inputs, outputs)
    values = s0e5m3(scale_bytes(scales, inputs // 16, outputs))
    bias_difference = 14 if fp16 else 126  # of FP4 and float16, of FP4 and bfloat16
    return dequantised(codes, values, scale * 2.0**-bias_difference)


def mxfp4(words: bytes, scales: bytes, inputs: int, outputs: int) -> Array:
    """Return what one expert's MXFP4 parameter stands for."""
    codes = weight_codes(words, inputs, outputs)
    return dequantised(codes, e8m0(scale_bytes(scales, inputs // 32, outputs)))
