"""The Marlin loops, compiled. Imported on first use: numba costs half a second, and is optional.

Every loop works on 64-bit words: 8 bytes of a row are one tile of 16 four-bit values. The lane loop
(over tiles) holds integer operations only, so that LLVM vectorises it; the loop after it only moves
words, a cache line at a time.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from moeconv.compiling import compiled

LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
HIGH_NIBBLES = np.uint64(0xF0F0F0F0F0F0F0F0)
LOW_WORD = np.uint64(0x00000000FFFFFFFF)
HIGH_WORD = np.uint64(0xFFFFFFFF00000000)
EVEN_HALVES = np.uint64(0x0000FFFF0000FFFF)
EVEN_BYTES = np.uint64(0x0000000000FF00FF)
U4, U8, U16, U24, U32 = (np.uint64(n) for n in (4, 8, 16, 24, 32))

TILE = 32
"""K tiles a pass: 8 rows of 256 bytes in, 32 cache lines out, both well inside L1."""

SCALE_TILE = 256
"""Groups a pass: a tile of 16 KB, and rows read in runs of up to 256 bytes."""


@njit(inline="always")
def _unzip(x1: np.uint64, x2: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Two rows' 8 bytes -> (row 1 | row 2 << 32) of low nibbles, the same of high nibbles."""
    a = (x1 & LOW_WORD) | (x2 << U32)
    b = (x1 >> U32) | (x2 & HIGH_WORD)
    return (a & LOW_NIBBLES) | ((b & LOW_NIBBLES) << U4), ((a >> U4) & LOW_NIBBLES) | (
        b & HIGH_NIBBLES
    )


@njit(inline="always")
def _zip(low: np.uint64, high: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Inverse of `_unzip`."""
    a = (low & LOW_NIBBLES) | ((high & LOW_NIBBLES) << U4)
    b = ((low >> U4) & LOW_NIBBLES) | (high & HIGH_NIBBLES)
    return (a & LOW_WORD) | (b << U32), (a >> U32) | (b & HIGH_WORD)


@njit(inline="always")
def _transpose(low: np.uint64, high: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Transpose the 4x4 bytes of (low's two words, high's two words); its own inverse."""
    t = ((low >> U16) ^ high) & EVEN_HALVES
    high ^= t
    low ^= t << U16
    t = ((low >> U8) ^ (low >> U32)) & EVEN_BYTES
    low ^= (t << U8) | (t << U32)
    t = ((high >> U8) ^ (high >> U32)) & EVEN_BYTES
    high ^= (t << U8) | (t << U32)
    return low, high


@compiled
def repack(source: np.ndarray, out: np.ndarray, stride_k: int, stride_n: int) -> None:
    """`source` u64 [N, K/16] -> `out` flat u64; strides in u64 of a K tile and of a unit."""
    rows, tiles = source.shape
    lanes = np.empty((8, TILE), np.uint64)
    for unit in range(rows // 64):
        for start in range(0, tiles, TILE):
            width = min(TILE, tiles - start)
            for column in range(8):
                for pair in range(2):
                    first = 64 * unit + 32 * pair + column
                    r0 = source[first, start : start + width]
                    r1 = source[first + 8, start : start + width]
                    r2 = source[first + 16, start : start + width]
                    r3 = source[first + 24, start : start + width]
                    o0, o1, o2, o3 = lanes[pair], lanes[2 + pair], lanes[4 + pair], lanes[6 + pair]
                    for k in range(width):
                        low, high = _unzip(r0[k], r1[k])
                        low, high = _transpose(low, high)
                        low2, high2 = _unzip(r2[k], r3[k])
                        low2, high2 = _transpose(low2, high2)
                        o0[k] = (low & LOW_WORD) | (low2 << U32)
                        o1[k] = (low >> U32) | (low2 & HIGH_WORD)
                        o2[k] = (high & LOW_WORD) | (high2 << U32)
                        o3[k] = (high >> U32) | (high2 & HIGH_WORD)
                at = start * stride_k + unit * stride_n + 8 * column
                for k in range(width):
                    line = out[at : at + 8]
                    for word in range(8):
                        line[word] = lanes[word, k]
                    at += stride_k


@compiled
def unrepack(packed: np.ndarray, stride_k: int, stride_n: int, source: np.ndarray) -> None:
    """Inverse of `repack`."""
    rows, tiles = source.shape
    lanes = np.empty((8, TILE), np.uint64)
    for unit in range(rows // 64):
        for start in range(0, tiles, TILE):
            width = min(TILE, tiles - start)
            for column in range(8):
                at = start * stride_k + unit * stride_n + 8 * column
                for k in range(width):
                    line = packed[at : at + 8]
                    for word in range(8):
                        lanes[word, k] = line[word]
                    at += stride_k
                for pair in range(2):
                    first = 64 * unit + 32 * pair + column
                    r0 = source[first, start : start + width]
                    r1 = source[first + 8, start : start + width]
                    r2 = source[first + 16, start : start + width]
                    r3 = source[first + 24, start : start + width]
                    o0, o1, o2, o3 = lanes[pair], lanes[2 + pair], lanes[4 + pair], lanes[6 + pair]
                    for k in range(width):
                        low, high = _transpose(
                            (o0[k] & LOW_WORD) | (o1[k] << U32), (o2[k] & LOW_WORD) | (o3[k] << U32)
                        )
                        r0[k], r1[k] = _zip(low, high)
                        low, high = _transpose(
                            (o0[k] >> U32) | (o1[k] & HIGH_WORD),
                            (o2[k] >> U32) | (o3[k] & HIGH_WORD),
                        )
                        r2[k], r3[k] = _zip(low, high)


@compiled
def permute_scales(
    source: np.ndarray,
    lut: np.ndarray,
    order: np.ndarray,
    out: np.ndarray,
    strides: tuple[int, int],
) -> None:
    """Fill runs of `out`, flat u8 `[G, N/64, 64]`, with `lut[source[order[p], g]]` at `p`."""
    stride_g, stride_n = strides
    rows, groups = source.shape
    tile = np.empty((SCALE_TILE, 64), np.uint8)  # [group, position]: no strided byte meets `out`
    position = np.empty(64, np.int64)
    for at in range(64):
        position[order[at]] = at
    for unit in range(rows // 64):
        for start in range(0, groups, SCALE_TILE):
            width = min(SCALE_TILE, groups - start)
            for row in range(64):  # in memory order, for the prefetcher
                values = source[64 * unit + row, start : start + width]
                at = position[row]
                for group in range(width):
                    tile[group, at] = lut[values[group]]
            first = start * stride_g + unit * stride_n
            for group in range(width):
                line = out[first : first + 64]
                for at in range(64):
                    line[at] = tile[group, at]
                first += stride_g


@compiled
def byte_counts(sources: np.ndarray, counts: np.ndarray) -> None:
    """Add the histograms of u8 rows `[n, size]` to `counts` `[n, 256]`.

    Four tables hide the store latency.
    """
    partial = np.empty((4, 256), np.int64)
    for number in range(len(sources)):
        source = sources[number]
        partial[:] = 0
        whole = source.size // 4 * 4
        for i in range(0, whole, 4):
            partial[0, source[i]] += 1
            partial[1, source[i + 1]] += 1
            partial[2, source[i + 2]] += 1
            partial[3, source[i + 3]] += 1
        for i in range(whole, source.size):
            partial[0, source[i]] += 1
        for value in range(256):
            for table in range(4):
                counts[number, value] += partial[table, value]
