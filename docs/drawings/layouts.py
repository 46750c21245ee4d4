"""How bytes move in each layout, drawn from the row maps that moeconv itself uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from drawings.svg import arrow, bracket, grid
from moeconv.bench.svg import BLANK, RANKS, box, label, line, picture
from moeconv.kernels.marlin import repack
from moeconv.kernels.rowmaps import interleave_rows, shuffle_rows
from moeconv.layouts import find_layout
from moeconv.layouts.layout import Geometry
from moeconv.layouts.verbs import MARLIN_ROWS, MARLIN_RUN_BYTES, MARLIN_TILE, MarlinWeight

GATE, UP = "#4c78a8", "#f5a742"
UNIT: Final = 32
"""Rows that stay together: 16 (up, gate) pairs."""


def overview() -> str:
    """From [gate; up] rows to the file, and what two ranks read of it."""
    parts = []
    for i, name in enumerate(("gate", "up")):
        top = 34 + 136 * i
        parts.append(label(20, top - 6, f"{name}.weight  [I, H], I = 128"))
        for unit in range(8):
            y = top + 14 * unit
            parts.append(box(20, y, (150, 14), RANKS[unit // 4], 1 - 0.55 * i))
            text = f"{name} rows {16 * unit} to {16 * unit + 15}"
            style = 'font-size="10"' + ("" if i else ' fill="#ffffff"')
            parts.append(label(28, y + 11, text, style))
    parts += arrow(184, 152, 40)
    parts.append(label(240, 28, "units of 32 rows: 16 (up, gate) pairs, shuffled"))
    for unit in range(8):
        top = 34 + 31.5 * unit
        parts += [
            box(240, top + 7 * band, (150, 7), RANKS[unit // 4], 1 if band % 2 else 0.45)
            for band in range(4)
        ]
        parts.append(label(398, top + 18, f"unit {unit}"))
    parts += arrow(446, 152, 40)
    parts.append(label(500, 90, "w13 of one expert in the file: unit after unit,"))
    parts.append(label(500, 106, "each cut into H/64 blocks of 32 rows × 128 bytes"))
    for unit in range(8):
        for block in range(2):
            x = 500 + 20 * (2 * unit + block)
            parts.append(box(x, 118, (20, 44), RANKS[unit // 4], 0.9 if unit % 2 else 0.7))
        parts.append(label(500 + 40 * unit + 20, 144, f"{unit}", 'text-anchor="middle"'))
    for rank in range(2):
        start = 500 + 160 * rank
        parts.append(bracket(168, start + 2, start + 158, RANKS[rank]))
        text = f"TP 2, rank {rank}: one range"
        parts.append(label(start + 80, 192, text, 'text-anchor="middle"'))
    return picture(840, 300, "Rows of gate and up become units; a rank reads one range", parts)


def rows() -> str:
    """The rows of one unit, from the source through the interleave to the shuffle."""
    interleaved = [int(row) for row in interleave_rows(UNIT)]
    final = [interleaved[int(row)] for row in shuffle_rows(UNIT)]
    columns = (("[gate; up]", list(range(UNIT))), ("pairs", interleaved), ("shuffled", final))
    pitch, width, left, top = 15, 76, (20, 186, 352), 44
    parts = [
        label(x + width / 2, 30, name, 'text-anchor="middle" font-weight="bold"')
        for x, (name, _) in zip(left, columns, strict=True)
    ]
    for x, (_, before), (_, after) in zip(left, columns, columns[1:], strict=False):
        for row in range(UNIT):
            start = top + pitch * (before.index(row) + 0.5)
            stop = top + pitch * (after.index(row) + 0.5)
            colour = GATE if row < UNIT // 2 else UP
            parts.append(line([(x + width, start), (x + 166, stop)], colour, 0.8))
    for x, (_, order) in zip(left, columns, strict=True):
        for at, row in enumerate(order):
            is_gate = row < UNIT // 2
            text = f"gate {row}" if is_gate else f"up {row - UNIT // 2}"
            y = top + pitch * at
            parts.append(box(x, y, (width, pitch), GATE if is_gate else UP))
            style = (
                f'text-anchor="middle" font-size="10" fill="{"#ffffff" if is_gate else "#222222"}"'
            )
            parts.append(label(x + width / 2, y + 11, text, style))
    parts += arrow(440, top + 16 * pitch, 44)
    parts.append(label(500, 30, "cut into K blocks", 'font-weight="bold"'))
    for block, name in enumerate(("0", "1", "…", "H/64 - 1")):
        x = 500 + 78 * block
        parts += [
            box(x, top + pitch * at, (70, pitch), GATE if row < UNIT // 2 else UP, 0.85)
            for at, row in enumerate(final)
        ]
        text = f"block {name}" if name != "…" else name
        parts.append(label(x + 35, top + UNIT * pitch + 18, text, 'text-anchor="middle"'))
    note = "a block is 32 rows × 64 values; block stands after block"
    parts.append(label(500, top + UNIT * pitch + 40, note, 'font-size="11"'))
    return picture(880, top + UNIT * pitch + 56, "The rows of one unit, step by step", parts)


def ranks() -> str:
    """One expert's w13 in the engine's order and in the stored order, for four ranks."""
    units, blocks, cell, left = 8, 4, 24, 20
    orders: tuple[tuple[str, Callable[[int], int]], ...] = (
        ("engine's order  [H/64, 2I, 64]: K block after K block", lambda at: at % units),
        ("stored order  [2I/32, H/64, 32, 64]: unit after unit", lambda at: at // blocks),
    )
    parts = []
    for i, (name, unit_at) in enumerate(orders):
        top = 40 + 118 * i
        parts.append(label(left, top - 8, name, 'font-weight="bold"'))
        runs: list[list[int]] = []
        for at in range(units * blocks):
            rank = unit_at(at) // 2
            parts.append(
                box(left + cell * at, top, (cell, 34), RANKS[rank], 1 if rank == 1 else 0.4)
            )
            if rank == 1 and runs and runs[-1][1] == at:
                runs[-1][1] = at + 1
            elif rank == 1:
                runs.append([at, at + 1])
        parts += [
            bracket(top + 38, left + cell * start + 2, left + cell * stop - 2, RANKS[1])
            for start, stop in runs
        ]
        text = f"TP 4, rank 1: {len(runs)} runs, one a K block" if i == 0 else "rank 1: one range"
        parts.append(label(left + cell * runs[0][0], top + 64, text))
    for rank in range(4):
        x = left + 110 * rank
        opacity = 1 if rank == 1 else 0.4
        parts += [box(x, 252, (14, 14), RANKS[rank], opacity), label(x + 20, 264, f"rank {rank}")]
    parts.append(label(left + 450, 264, "drawn with 8 units and 4 K blocks"))
    return picture(808, 282, "What one rank of four reads, in two orders", parts)


def marlin_nibbles() -> list[tuple[int, int]]:
    """Return (row, value) of each 4-bit code of a run, the low nibble of each byte first.

    Four bits at a time of each code's number go through the repack that moeconv uses.
    """
    number = np.arange(MARLIN_ROWS * MARLIN_TILE)
    verb = MarlinWeight(MARLIN_ROWS, 1, 1, stored=True)
    found = np.zeros_like(number)
    for shift in (0, 4, 8):
        codes = (number >> shift & 15).astype(np.uint8).reshape(MARLIN_ROWS, MARLIN_TILE)
        source = np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4)
        run = np.empty(MARLIN_RUN_BYTES, np.uint8)
        repack(verb, source, run)
        found |= np.stack((run & 15, run >> 4), axis=-1).reshape(-1).astype(int) << shift
    return [(int(at) // MARLIN_TILE, int(at) % MARLIN_TILE) for at in found]


def marlin() -> str:
    """One unit and tile of a 4-bit matrix, and where three words of its run come from."""
    nibbles, shown = marlin_nibbles(), {0: RANKS[0], 5: RANKS[1], 127: RANKS[2]}
    places = {at: word for word in shown for at in nibbles[8 * word : 8 * word + 8]}
    wide, high, left, top = 16, 6.5, 66, 58
    parts = [
        label(left, 24, "source: 64 rows × 16 values, 4 bits each", 'font-weight="bold"'),
        *(
            label(left + wide * (k + 0.5), top - 8, f"{k}", 'text-anchor="middle" font-size="9"')
            for k in range(MARLIN_TILE)
        ),
        *(
            label(left - 8, top + high * (row + 1), f"row {row}", 'text-anchor="end" font-size="9"')
            for row in (*range(0, MARLIN_ROWS, 8), MARLIN_ROWS - 1)
        ),
    ]
    parts += grid(left, top, (wide, high), (MARLIN_TILE, MARLIN_ROWS))
    for (row, k), word in places.items():
        parts.append(box(left + wide * k, top + high * row, (wide, high), shown[word]))
    parts += arrow(344, 260, 40)
    parts.append(label(410, 24, "run: 128 words of 32 bits, 512 bytes", 'font-weight="bold"'))
    cell = 24
    parts += grid(410, 40, (cell, 14), (16, len(nibbles) // 8 // 16))
    for word, colour in shown.items():
        parts.append(box(410 + cell * (word % 16), 40 + 14 * (word // 16), (cell, 14), colour))
    for i, (word, colour) in enumerate(shown.items()):
        y = 206 + 96 * i
        parts.append(label(410, y - 8, f"word {word}, lowest bits first", f'fill="{colour}"'))
        for at, (row, k) in enumerate(nibbles[8 * word : 8 * word + 8]):
            x = 410 + 49 * at
            parts.append(box(x, y, (49, 40), colour))
            style = 'text-anchor="middle" font-size="10" fill="#ffffff"'
            parts += [
                label(x + 24, y + 17, f"row {row}", style),
                label(x + 24, y + 31, f"value {k}", style),
            ]
    return picture(820, 496, "Where the codes of three words of a Marlin tile come from", parts)


def uneven() -> str:
    """The slices of gpt-oss's intermediate size, and what the engine pads them to."""
    layout = find_layout("marlin-mxfp4-gptoss")
    assert layout is not None
    sizes = Geometry(experts=128, hidden=2880, intermediate=2880, gated=True, order="pairs")
    scale, left, parts = 0.24, 60, []
    for i, tp in enumerate((2, 4, 8)):
        top, at = 56 + 96 * i, float(left)
        parts.append(label(14, top + 24, f"TP {tp}", 'font-weight="bold"'))
        for rank in range(tp):
            cut = layout.rank_slice(sizes, tp, rank)
            padded = cut.padded or cut.size
            width = scale * cut.size
            parts.append(box(at, top, (width, 36), RANKS[rank % 4]))
            if padded > cut.size:
                parts.append(box(at + width, top, (scale * (padded - cut.size), 36), BLANK))
            style = 'text-anchor="middle" font-size="10"'
            parts.append(label(at + width / 2, top + 22, f"{cut.size}", f'{style} fill="#ffffff"'))
            parts.append(label(at + width / 2, top + 52, f"from {cut.start}", style))
            at += scale * padded + 6
    title = "gpt-oss, I = 2880 = 90 blocks of 32: each rank's slice, and the padding (grey)"
    parts.append(label(14, 28, title, 'font-weight="bold"'))
    return picture(860, 328, "Uneven slices of gpt-oss, each padded to a multiple of 128", parts)
