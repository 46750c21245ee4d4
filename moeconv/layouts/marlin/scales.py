"""The bytes of NVFP4 block scales: FP8 E4M3 in the checkpoint, S0E5M3 under Marlin.

Both are one byte, so what an engine does to a scale in floating point is a table of 256 bytes. The
tables follow vLLM 0.33.0, `nvfp4_marlin_process_scales` and `_nvfp4_compute_scale_factor`, and
SGLang 0.5.23, `nvfp4_marlin_process_scales`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    Values: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    Counts: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    Mask: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

E4M3_MAX: Final = 448.0
_NAN_BYTES: Final = (0x7F, 0xFF)
_NAN_IMAGE: Final = 0xFF
"""What both engines make of a NaN scale on CUDA (torch 2.11)."""
_FLUSH_BELOW: Final = 2
"""After the factor 2^7: what has no normal S0E5M3 form becomes zero (vLLM only)."""


@cache
def e4m3_values() -> Values:
    """Return the values of the 256 bytes of `float8_e4m3fn`."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    value[[*_NAN_BYTES]] = np.nan
    return np.where(byte & 128, -value, value).astype(np.float32)


@cache
def recode(factor: float, *, flush: bool) -> bytes:
    """Return the table from E4M3 bytes to S0E5M3 bytes.

    The byte is the high one of `half(scale * factor * 2^7) << 1`. With `flush` (vLLM) values below
    2 become zero first, negative ones among them; without (SGLang) the sign is shifted out, so a
    negative scale gets the byte of its magnitude.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        half = (e4m3_values() * np.float32(factor)).astype(np.float16) * np.float16(2**7)
    if flush:
        half[half < _FLUSH_BELOW] = 0
    table = (half.view(np.uint16) << np.uint16(1) >> np.uint16(8)).astype(np.uint8)
    table[[*_NAN_BYTES]] = _NAN_IMAGE
    return bytes(table)


@cache
def rescale(ratio: float) -> bytes:
    """Return the table from E4M3 bytes to those of `ratio` times their value, rounded to nearest.

    It reconciles two halves to one global scale; ties go to the even byte, as in every FP8 cast.
    """
    values = e4m3_values()
    positive = values[:0x7F].astype(np.float64)
    wanted = np.abs(values.astype(np.float64)) * ratio
    middles = (positive[1:] + positive[:-1]) / 2
    below = np.searchsorted(middles, wanted, side="left")
    tied = np.isin(wanted, middles) & (below % 2 == 1)
    nearest = np.minimum(below + tied, 0x7E).astype(np.uint8)
    table = np.where(np.arange(256) & 128, nearest | 0x80, nearest).astype(np.uint8)
    table[[*_NAN_BYTES]] = _NAN_BYTES
    return bytes(table)


def flushed(table: bytes) -> Mask:
    """Return which source bytes of a positive value a table turns into zero."""
    mask: Mask = (e4m3_values() > 0) & (np.frombuffer(table, np.uint8) == 0)
    return mask


@cache
def lossy(table: bytes) -> Mask:
    """Return which source bytes a table gives to a lower byte as well, which stands for them."""
    mask: Mask = np.array([table.index(image) != byte for byte, image in enumerate(table)])
    return mask


def negative() -> Mask:
    """Return which source bytes are below zero, or NaN: what the engine warns of."""
    mask: Mask = ~(e4m3_values() >= 0)
    return mask


def factor(counts: Counts) -> float:
    """Return the power of two that lifts a layer's scales as far as they go.

    `2^floor(log2(448 / max))`, or 1 where the maximum is 448 or there is none; the maximum is over
    all experts of one fused projection. NaN and negative scales do not count.
    """
    present = np.flatnonzero(counts[:0x7F])
    largest = float(e4m3_values()[present[-1]]) if present.size else 0.0
    if not 0 < largest < E4M3_MAX:
        return 1.0
    mantissa, exponent = np.frexp(largest)  # 448 is 0.875 * 2^9
    return float(2.0 ** (9 - int(exponent) - (1 if mantissa > E4M3_MAX / 2**9 else 0)))
