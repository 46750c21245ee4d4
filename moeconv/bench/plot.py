"""Bars of what was measured against what the machine can do, as an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moeconv.bench.svg import INK, RANKS, box, label, line, picture

_SIZE: Final = 860
_LEFT, _WIDTH, _ROW, _TOP = 330, 380, 22, 44


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio and what it is of; the ceiling is 1."""

    label: str
    ratio: float
    note: str


def bars(title: str, ceiling: str, rows: Sequence[Bar]) -> str:
    """Return an SVG picture of bars, with a line at the ceiling, readable on light and dark.

    Parameters
    ----------
    title
        What is shown.
    ceiling
        What 1 stands for.
    rows
        The bars, from above.
    """
    unit = _WIDTH / max((1.0, *(row.ratio for row in rows)))
    bottom = _TOP + _ROW * len(rows)
    parts = [label(16, 26, title, 'font-weight="bold"')]
    for i, row in enumerate(rows):
        y, width = _TOP + _ROW * i, unit * row.ratio
        parts += [
            label(_LEFT - 8, y + 13, row.label, 'text-anchor="end"'),
            box(_LEFT, y + 2, (width, 15), RANKS[0 if row.ratio <= 1 else 1]),
            label(_LEFT + max(width, unit) + 6, y + 13, row.note),
        ]
    x = _LEFT + unit
    parts += [
        line([(x, _TOP - 4), (x, bottom + 4)], INK),
        label(x, bottom + 20, ceiling, 'text-anchor="middle"'),
    ]
    return picture(_SIZE, bottom + 34, title, parts)
