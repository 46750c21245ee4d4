"""The Triton kernels: what one program moves. `kernels.triton` launches them.

Every kernel serves both ways, since a move backwards loads what it stored and stores what it
loaded: `laid` is the engine's side, `source` the checkpoint's. The last grid axis is the expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ITEM = tl.constexpr(16)
"""64-bit words of a K block."""
_SHUFFLED = tl.constexpr(32)
"""Rows that one program moves: the shuffle keeps them within one unit of the result."""
_UNIT = tl.constexpr(64)
_RUN = tl.constexpr(128)
"""32-bit words of a run."""
_TABLE = tl.constexpr(256)
_BF16_BYTES = tl.constexpr(2)
_HALF = tl.constexpr(0x400000)
_NAN_EXPONENT = tl.constexpr(255)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def move_blocks(
    source: tl.tensor,
    laid: tl.tensor,
    row_map: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    unit_rows: tl.tensor,
    BLOCKS: tl.constexpr,
    BACK: tl.constexpr,
) -> None:
    """Move 32 rows of `BLOCKS` K blocks; `row_map` has the source row of each row of the result."""
    wide = tl.cdiv(blocks, BLOCKS)
    first = tl.program_id(0) // wide * _SHUFFLED
    expert = tl.program_id(1).to(tl.int64) * rows * blocks * _ITEM
    row = tl.arange(0, _SHUFFLED)[:, None, None]
    block = tl.program_id(0) % wide * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]
    word = tl.arange(0, _ITEM)[None, None, :]
    there = tl.load(row_map + first + row) * blocks + block
    unit = (first // unit_rows * blocks + block) * unit_rows
    here = unit + first % unit_rows + row
    from_source = source + expert + there * _ITEM + word
    from_laid = laid + expert + here * _ITEM + word
    inside = block < blocks
    if BACK:
        tl.store(from_source, tl.load(from_laid, mask=inside), mask=inside)
    else:
        tl.store(from_laid, tl.load(from_source, mask=inside), mask=inside)


@triton.jit
def move_tiles(
    source: tl.tensor,
    laid: tl.tensor,
    shape: tl.tuple,
    strides: tl.tuple,
    TILES: tl.constexpr,
    BACK: tl.constexpr,
) -> None:
    """Move one unit of `TILES` tiles; `strides` count runs of the result: half, unit, tile."""
    halves, units, tiles = shape
    wide = tl.cdiv(tiles, TILES)
    unit = tl.program_id(0) // wide
    half = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64) * halves * units * tiles
    tile = tl.program_id(0) % wide * TILES + tl.arange(0, TILES)
    inside = tile < tiles
    # [c, j, tile]: the row 16 j + c of the unit, and the row 8 below it
    row = tl.arange(0, 4)[None, :, None] * 16 + tl.arange(0, 8)[:, None, None]
    words = source + (expert + (half * units + unit) * tiles) * _UNIT
    words += row * tiles + tile[None, None, :]
    run = expert + half * strides[0] + unit * strides[1] + tile * strides[2]
    runs = laid + run[:, None] * _RUN + tl.arange(0, _RUN)[None, :]
    if BACK:
        run_words = tl.load(runs, mask=inside[:, None])
        upper, lower = _source_words(run_words, TILES)
        tl.store(words, upper, mask=inside[None, None, :])
        tl.store(words + 8 * tiles, lower, mask=inside[None, None, :])
    else:
        upper = tl.load(words, mask=inside[None, None, :])
        lower = tl.load(words + 8 * tiles, mask=inside[None, None, :])
        tl.store(runs, _run_words(upper, lower, TILES), mask=inside[:, None])


@triton.jit
def _run_words(upper: tl.tensor, lower: tl.tensor, TILES: tl.constexpr) -> tl.tensor:
    """Turn two rows' 64-bit words `[c, j, tile]` into runs `[tile, 16 c + 4 t + j]`."""
    low_1, high_1 = _unzip(upper)
    low_2, high_2 = _unzip(lower)
    t_0, t_1, t_2, t_3 = _transpose(low_1, low_2, high_1, high_2)
    joined = tl.join(tl.join(t_0, t_2), tl.join(t_1, t_3))  # [c, j, tile, t / 2, t % 2]
    return joined.permute(2, 0, 3, 4, 1).reshape(TILES, _RUN)


@triton.jit
def _source_words(runs: tl.tensor, TILES: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Undo `_run_words`."""
    joined = runs.reshape(TILES, 8, 2, 2, 4).permute(1, 4, 0, 2, 3)
    even, odd = tl.split(joined)
    t_0, t_2 = tl.split(even)
    t_1, t_3 = tl.split(odd)
    low_1, low_2, high_1, high_2 = _transpose(t_0, t_1, t_2, t_3)
    return _zip(low_1, high_1), _zip(low_2, high_2)


@triton.jit
def _unzip(word: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the low nibbles of a row's 16 values, and the high ones: 32 bits each."""
    a, b = word.to(tl.int32), (word >> 32).to(tl.int32)
    low = (a & 0x0F0F0F0F) | ((b & 0x0F0F0F0F) << 4)
    return low, ((a >> 4) & 0x0F0F0F0F) | (b & -0x0F0F0F10)


@triton.jit
def _zip(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Undo `_unzip`."""
    a = (low & 0x0F0F0F0F) | ((high & 0x0F0F0F0F) << 4)
    b = ((low >> 4) & 0x0F0F0F0F) | (high & -0x0F0F0F10)
    return (b.to(tl.int64) << 32) | (a.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _transpose(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Transpose 4x4 bytes; its own inverse."""
    a, c = _exchange(a, c, 16, 0x0000FFFF)
    b, d = _exchange(b, d, 16, 0x0000FFFF)
    a, b = _exchange(a, b, 8, 0x00FF00FF)
    c, d = _exchange(c, d, 8, 0x00FF00FF)
    return a, b, c, d


@triton.jit
def _exchange(
    a: tl.tensor, b: tl.tensor, SHIFT: tl.constexpr, MASK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Exchange the bits of `a` that are `SHIFT` above `MASK` with the bits `MASK` of `b`."""
    bits = ((a >> SHIFT) ^ b) & MASK
    return a ^ (bits << SHIFT), b ^ bits


@triton.jit
def move_rows(
    source: tl.tensor,
    laid: tl.tensor,
    order: tl.tensor,
    tables: tl.tensor,
    shape: tl.tuple,
    strides: tl.tuple,
    GROUPS: tl.constexpr,
    POWER: tl.constexpr,
    RECODED: tl.constexpr,
    BACK: tl.constexpr,
) -> None:
    """Move `GROUPS` items of each row of one unit; `order` has the row of each position.

    `strides` count units of 64 items of the result: half, unit, group. `tables` are of 256 bytes,
    one a half, where `RECODED`. `POWER` is the size of a source item that is a power of two, or 0.
    """
    halves, units, groups = shape
    wide = tl.cdiv(groups, GROUPS)
    unit = tl.program_id(0) // wide
    half = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64) * halves * units * groups * _UNIT
    position = tl.arange(0, _UNIT)[:, None]
    group = tl.program_id(0) % wide * GROUPS + tl.arange(0, GROUPS)[None, :]
    inside = group < groups
    row = (half * units + unit) * _UNIT + tl.load(order + position)
    rows = source + expert + row * groups + group
    begin = half * strides[0] + unit * strides[1] + group * strides[2]
    places = laid + expert + begin * _UNIT + position
    if BACK:
        items = tl.load(places, mask=inside)
        if RECODED:
            items = _recoded(items, tables + half * _TABLE, GROUPS)
        if POWER:
            items = _power(items, POWER)
        tl.store(rows, items, mask=inside)
    else:
        items = tl.load(rows, mask=inside)
        if POWER:
            items = _exponent(items, POWER)
        if RECODED:
            items = _recoded(items, tables + half * _TABLE, GROUPS)
        tl.store(places, items, mask=inside)


@triton.jit
def _recoded(items: tl.tensor, table: tl.tensor, GROUPS: tl.constexpr) -> tl.tensor:
    """Look bytes up in shared memory: a third faster than the same from the cache."""
    found = tl.gather(
        tl.load(table + tl.arange(0, _TABLE)), items.to(tl.int32).reshape(_UNIT * GROUPS), 0
    )
    return found.reshape(_UNIT, GROUPS)


@triton.jit
def _exponent(items: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return exponent bytes, as `kernels.scalars.power_bytes` defines them."""
    bits = items.to(tl.int32)
    if SIZE == _BF16_BYTES:
        bits = bits << 16
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    half = tl.where(exponent > 0, mantissa >= _HALF, mantissa > _HALF)
    return (exponent + (half & (exponent < _NAN_EXPONENT)).to(tl.int32)).to(tl.uint8)


@triton.jit
def _power(exponents: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return powers of two, as `kernels.scalars.source_powers` defines them."""
    wide = exponents.to(tl.int32)
    bits = tl.where(wide == 0, _HALF, tl.where(wide == _NAN_EXPONENT, _NAN, wide << 23))
    if SIZE == _BF16_BYTES:
        bits = (bits >> 16).to(tl.int16)
    return bits
