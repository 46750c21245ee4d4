"""Global scales: one number an expert, in the engine's arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from moeconv.layouts.verbs import GlobalScale, MarlinRows
    from moeconv.tensors import Bytes

    Floats: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    Bits: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]

_BF16_BYTES: Final = 2
_HALF: Final = 0x400000
_NAN_EXPONENT: Final = 255
_SMALLEST: Final = 0x400000
"""2^-127 as a float32: a subnormal, and what the byte 0 stands for."""
_NAN: Final = 0x7FC00000


def global_scale(verb: GlobalScale, source: Bytes, out: Bytes) -> None:
    """Fill `out` with one number."""
    global_scales(verb, source.reshape(1, -1), out.reshape(1, -1))


def global_scales(verb: GlobalScale, sources: Bytes, outs: Bytes) -> None:
    """Fill each row of `outs` with one number of one expert.

    vLLM 0.33.0, `nvfp4_marlin_process_global_scale` and `prepare_nvfp4_moe_layer_for_marlin`, in
    float32; SGLang 0.5.23, functions of the same names, rounds to the serving dtype first.
    """
    scales = np.ascontiguousarray(sources).view(np.float32)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if verb.reciprocal:
            scales = np.float32(1.0) / scales
        scale = scales.max(axis=1, keepdims=True) if verb.largest else scales[:, :1]
        exponent = np.float32(2.0**verb.exponent)
        if verb.dtype == "F32":
            bits = (scale * exponent / np.float32(verb.divisor)).view(np.uint8)
        elif verb.dtype == "F16":
            rounded = scale.astype(np.float16).astype(np.float32)
            bits = (rounded * exponent).astype(np.float16).view(np.uint8)
        else:
            rounded = _from_bf16(_to_bf16(scale))
            bits = _to_bf16(rounded * exponent).view(np.uint8)
    outs[...] = bits


def source_scale(verb: GlobalScale, stored: Bytes, source: Bytes) -> None:
    """Fill every projection's place in `source` with what one number gives back.

    The powers of two go back exactly. Not exact: a scale that was rounded to the serving dtype, a
    reciprocal of a reciprocal, and the scale of a projection that differs from the one kept.
    """
    flat = stored.reshape(-1)
    scale: Floats
    if verb.dtype == "F32":
        scale = flat.view(np.float32)
    elif verb.dtype == "F16":
        scale = flat.view(np.float16).astype(np.float32)
    else:
        scale = _from_bf16(flat.view(np.uint16))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = scale * np.float32(verb.divisor) / np.float32(2.0**verb.exponent)
        if verb.reciprocal:
            scale = np.float32(1.0) / scale
    source.view(np.float32)[...] = scale


def power_bytes(verb: MarlinRows, source: Bytes) -> Bytes:
    """Return the exponent byte (E8M0) of each floating-point item of a source matrix.

    Rounded to the nearest power of two, ties to the larger one, as torch casts to
    `float8_e8m0fnu`; vLLM 0.33.0, `Mxfp4MoEMethod._encode_mxfp4_weight_scale`. The sign is lost.
    """
    if not verb.power_bytes:
        return source
    exponents = _exponents(_float_bits(source, verb.power_bytes))
    return exponents.astype(np.uint8).reshape(source.shape[0], -1)


def source_powers(verb: MarlinRows, exponents: Bytes, source: Bytes) -> None:
    """Fill a floating-point source matrix with the powers of two of its exponent bytes."""
    bits = _powers(exponents.reshape(-1).astype(np.uint32))
    if verb.power_bytes == _BF16_BYTES:
        source.reshape(-1).view(np.uint16)[...] = bits >> np.uint32(16)
    else:
        source.reshape(-1).view(np.uint32)[...] = bits


def are_powers(source: Bytes, item_bytes: int) -> bool:
    """Return whether every floating-point item comes back from its exponent byte."""
    bits = _float_bits(np.ascontiguousarray(source), item_bytes)
    return np.array_equal(_powers(_exponents(bits)), bits)


def _float_bits(source: Bytes, item_bytes: int) -> Bits:
    if item_bytes == _BF16_BYTES:
        return source.reshape(-1).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return source.reshape(-1).view(np.uint32)


def _exponents(bits: Bits) -> Bits:
    exponent = bits >> np.uint32(23) & np.uint32(0xFF)
    mantissa = bits & np.uint32(0x7FFFFF)
    # Below the smallest normal number only what is over its half rounds up to it.
    half = np.where(exponent > 0, mantissa >= _HALF, mantissa > _HALF)
    return exponent + (half & (exponent < _NAN_EXPONENT))


def _powers(exponents: Bits) -> Bits:
    bits = np.where(exponents == 0, _SMALLEST, exponents << np.uint32(23))
    return np.where(exponents == _NAN_EXPONENT, _NAN, bits).astype(np.uint32)


def _to_bf16(values: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """Round to the nearest bfloat16, ties to even; NaN is 0x7FC0, as in torch."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _from_bf16(bits: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]) -> Floats:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
