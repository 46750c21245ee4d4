"""Marlin's tiles on the host: a nibble unzip and a 4x4 byte transpose, in whole 512-byte runs.

A row's 8 bytes of one tile are A (values 0-7) and B (8-15), 4 bytes each. With rows n1 = 16j + c
and n2 = n1 + 8 of a unit (c < 8), low(n) is the low nibbles of A with those of B above them, and
high(n) the same of the high nibbles. The word at 16c + 4t + j of the run is then the bytes
{low(n1)[t], low(n2)[t], high(n1)[t], high(n2)[t]}: vLLM 0.33.0, `marlin_weights` and
`get_weight_perm(4)` of `marlin_utils_test`, with its interleave.

The engine's and the stored order are the same runs under other strides, so one loop serves both.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from moeconv.kernels.scalars import power_bytes, source_powers
from moeconv.layouts.verbs import MARLIN_ROWS, MARLIN_RUN_BYTES

if TYPE_CHECKING:
    from types import ModuleType

    from moeconv.layouts.verbs import MarlinRows, MarlinWeight
    from moeconv.tensors import Bytes

    Index: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.intp]]
    Words: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
    Lines: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.void]]

_RUN_WORDS: Final = MARLIN_RUN_BYTES // 8
_CHUNK: Final = 128
"""Tiles a numpy pass: 64 rows of 1 KB, twice (the words and one temporary), stay in L2."""


@functools.cache
def compiled() -> ModuleType | None:
    """Return the compiled loops, or `None` where numba is not installed."""
    try:
        from moeconv.kernels import marlin_numba
    except ImportError:
        return None
    return marlin_numba


def repack(verb: MarlinWeight, source: Bytes, out: Bytes) -> None:
    """Fill `out` with the runs of `source`."""
    _each_half(verb, source, out, inverse=False)


def unrepack(verb: MarlinWeight, stored: Bytes, source: Bytes) -> None:
    """Fill `source` with what `repack` made `stored` from."""
    _each_half(verb, source, stored, inverse=True)


def _each_half(verb: MarlinWeight, source: Bytes, packed: Bytes, *, inverse: bool) -> None:
    words = source.reshape(verb.halves, verb.rows, -1).view(np.uint64)
    flat = packed.reshape(-1).view(np.uint64)
    units = verb.rows // MARLIN_ROWS
    loops = compiled()
    for half in range(verb.halves):
        if verb.stored:
            first, tile, unit = half * verb.tiles, 1, verb.halves * verb.tiles
        else:
            first, tile, unit = half * units, verb.halves * units, 1
        strides = (tile * _RUN_WORDS, unit * _RUN_WORDS)
        runs = flat[first * _RUN_WORDS :]
        if loops is None:
            _numpy_pass(words[half], runs, strides, inverse=inverse)
        elif inverse:
            loops.unrepack(runs, *strides, words[half])
        else:
            loops.repack(words[half], runs, *strides)


class _Swaps:
    """The four delta swaps on one chunk `x [row or row + 8, j, j pair, c, tile]` of 64-bit words.

    Each is its own inverse. Nibbles: (A, B) to (low, high) in each row. Bytes: even bytes of both
    rows, odd bytes of both rows. Halves: words 0 and 2, words 1 and 3. Words: those of j and j + 1
    side by side.
    """

    def __init__(self, tiles: int) -> None:
        self.x = np.empty((2, 2, 2, 8, tiles), np.uint64)
        self._t = np.empty_like(self.x)
        items = np.empty((8, tiles, 2, 2, 2), np.uint64)  # [c, tile, t (2 axes), j pair]
        self.lines: Lines = items.reshape(8, tiles, 8).view("V64")[..., 0]
        self.pieces = [
            (self.x[odd, upper, pair], items[:, :, upper, odd, pair])
            for odd, upper, pair in itertools.product(range(2), repeat=3)
        ]

    def forward(self) -> None:
        """Go from source words to the words of the runs."""
        self._within(28, 0x00000000F0F0F0F0)
        self._between(0, 8, 0x00FF00FF00FF00FF)
        self._within(16, 0x00000000FFFF0000)
        self._between(1, 32, 0x00000000FFFFFFFF)

    def backward(self) -> None:
        """Go from the words of the runs to source words."""
        self._between(1, 32, 0x00000000FFFFFFFF)
        self._within(16, 0x00000000FFFF0000)
        self._between(0, 8, 0x00FF00FF00FF00FF)
        self._within(28, 0x00000000F0F0F0F0)

    def _within(self, shift: int, mask: int) -> None:
        """Exchange, inside each word, the bits `mask` with those `shift` above them."""
        x, t = self.x, self._t
        np.right_shift(x, np.uint64(shift), out=t)
        t ^= x
        t &= np.uint64(mask)
        x ^= t
        t <<= np.uint64(shift)
        x ^= t

    def _between(self, axis: int, shift: int, mask: int) -> None:
        """Exchange bits above `shift` of one half of an axis with bits `mask` of the other."""
        first, second = self.x.take(0, axis), self.x.take(1, axis)
        t = ((first >> np.uint64(shift)) ^ second) & np.uint64(mask)
        views = (self.x[0], self.x[1]) if axis == 0 else (self.x[:, 0], self.x[:, 1])
        np.bitwise_xor(second, t, out=views[1])
        np.bitwise_xor(first, t << np.uint64(shift), out=views[0])


def _numpy_pass(words: Words, runs: Words, strides: tuple[int, int], *, inverse: bool) -> None:
    """Repack, or undo it, in numpy alone: one unit and `_CHUNK` tiles at a time."""
    rows, tiles = words.shape
    units = rows // MARLIN_ROWS
    shape = (tiles, units, _RUN_WORDS // 8, 8)
    view = np.lib.stride_tricks.as_strided(runs, shape, (8 * strides[0], 8 * strides[1], 64, 8))
    lines: Lines = view.view("V64")[..., 0]  # [tile, unit, c]
    grid = words.reshape(units, 2, 2, 2, 8, tiles).transpose(0, 3, 2, 1, 4, 5)
    for start in range(0, tiles, _CHUNK):
        stop = min(start + _CHUNK, tiles)
        swaps = _Swaps(stop - start)
        for unit in range(units):
            here, there = grid[unit, ..., start:stop], lines[start:stop, unit].T
            if inverse:
                swaps.lines[...] = there
                for kept, items in swaps.pieces:
                    kept[...] = items
                swaps.backward()
                here[...] = swaps.x
            else:
                swaps.x[...] = here
                swaps.forward()
                for kept, items in swaps.pieces:
                    items[...] = kept
                there[...] = swaps.lines


def unit_order(order: str) -> Index:
    """Return which of a unit's 64 rows stands at each of its 64 positions.

    vLLM 0.33.0, `marlin_permute_scales` takes the 64-wide permutation where there is more than one
    group (`group_size < size_k`) and the 32-wide `single` one otherwise, then every four columns
    are reordered `[0, 2, 1, 3]` (`nvfp4_` and `mxfp4_marlin_process_scales`). Biases take `single`
    alone (`marlin_permute_bias`).
    """
    position = np.arange(MARLIN_ROWS)
    block = np.arange(32).reshape(4, 4, 2).transpose(1, 0, 2).reshape(-1)
    single = (np.arange(0, MARLIN_ROWS, 32)[:, None] + block).reshape(-1)
    if order == "bias":
        return single
    wide = position.reshape(8, 8).T.reshape(-1)
    swapped = position // 4 * 4 + np.array([0, 2, 1, 3])[position % 4]
    taken: Index = (wide if order == "wide" else single)[swapped]
    return taken


@functools.lru_cache(maxsize=32)
def row_index(verb: MarlinRows) -> Index:
    """Return, for each output item, the source item it holds: the definition of `MarlinRows`."""
    units = verb.rows // MARLIN_ROWS
    items = np.arange(verb.halves * verb.rows * verb.groups)
    runs = items.reshape(verb.halves, units, MARLIN_ROWS, verb.groups)[:, :, unit_order(verb.order)]
    axes = (1, 0, 3, 2) if verb.stored else (3, 0, 1, 2)
    return np.ascontiguousarray(runs.transpose(axes).reshape(-1))


def permute_rows(verb: MarlinRows, source: Bytes, out: Bytes) -> None:
    """Fill `out` with the rows of `source`, transposed, permuted and recoded."""
    source = power_bytes(verb, source)
    loops = compiled()
    order = unit_order(verb.order)
    if loops is None or verb.item_bytes != 1:
        mapped = source
        if verb.recode:
            mapped = np.concatenate(
                [
                    np.frombuffer(table, np.uint8)[half]
                    for table, half in zip(
                        verb.recode, source.reshape(verb.halves, -1), strict=True
                    )
                ]
            )
        _view(verb, out)[...] = _runs(verb, mapped)[:, :, order]
        return
    units, halves = verb.rows // MARLIN_ROWS, verb.halves
    flat = out.reshape(-1)
    for half, rows in enumerate(source.reshape(halves, verb.rows, verb.groups)):
        table = np.frombuffer(verb.recode[half], np.uint8) if verb.recode else _IDENTITY
        if verb.stored:
            first, group, unit = half * verb.groups, 1, halves * verb.groups
        else:
            first, group, unit = half * units, halves * units, 1
        begin = flat[first * MARLIN_ROWS :]
        strides = (group * MARLIN_ROWS, unit * MARLIN_ROWS)
        loops.permute_scales(rows, table, order, begin, strides)


def unpermute_rows(verb: MarlinRows, stored: Bytes, source: Bytes) -> None:
    """Fill `source` with the lowest bytes that `permute_rows` makes `stored` from."""
    if verb.power_bytes:
        exponents = np.empty((source.shape[0], verb.groups), np.uint8)
        unpermute_rows(replace(verb, power_bytes=0), stored, exponents)
        source_powers(verb, exponents, source)
        return
    _runs(verb, source)[:, :, unit_order(verb.order)] = _view(verb, stored)
    for half, table in zip(source.reshape(verb.halves, -1), verb.recode, strict=False):
        half[...] = inverse_table(table)[half]


@functools.cache
def inverse_table(table: bytes) -> Bytes:
    """Return the lowest byte that a table maps to each byte."""
    inverse = np.zeros(256, np.uint8)
    descending = np.arange(255, -1, -1)
    inverse[np.frombuffer(table, np.uint8)[descending]] = descending
    return inverse


_IDENTITY: Final = np.arange(256, dtype=np.uint8)


def _runs(verb: MarlinRows, source: Bytes) -> Bytes:
    """View a source matrix as `[half, unit, row, group]` items."""
    items = source.reshape(-1).view(f"u{verb.item_bytes}")
    view: Bytes = items.reshape(verb.halves, -1, MARLIN_ROWS, verb.groups)
    return view


def _view(verb: MarlinRows, out: Bytes) -> Bytes:
    """View a result as `[half, unit, position, group]` items."""
    items = out.reshape(-1).view(f"u{verb.item_bytes}")
    units = verb.rows // MARLIN_ROWS
    if verb.stored:
        stored: Bytes = items.reshape(units, verb.halves, verb.groups, MARLIN_ROWS)
        return stored.transpose(1, 0, 3, 2)
    engine: Bytes = items.reshape(verb.groups, verb.halves, units, MARLIN_ROWS)
    return engine.transpose(1, 2, 3, 0)


def count_bytes(sources: Bytes) -> Index:
    """Return how often each byte value occurs in each of `sources` `[n, …]`: `[n, 256]`."""
    rows = np.ascontiguousarray(sources).reshape(len(sources), -1)
    counts = np.zeros((len(rows), 256), np.int64)
    loops = compiled()
    if loops is not None:
        loops.byte_counts(rows, counts)
        return counts
    for number, row in enumerate(rows):
        for start in range(0, row.size, 1 << 16):  # bincount widens to 8 bytes a byte
            counts[number] += np.bincount(row[start : start + (1 << 16)], minlength=256)
    return counts
