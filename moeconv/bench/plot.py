"""Bars of what was measured against what the machine can do, as an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

_STYLE: Final = (
    "<style>svg{color:#222;fill:#222}.ground{fill:#fbfbfa}.bar{fill:#4c78a8}.over{fill:#f58518}"
    "@media(prefers-color-scheme:dark){svg{color:#ddd;fill:#ddd}.ground{fill:#181a1f}}</style>"
)
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
    most = max((row.ratio for row in rows), default=1.0)
    unit = _WIDTH / max(most, 1.0)
    height = _TOP + _ROW * len(rows) + 34
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" width="860" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="12" role="img">'
    )
    parts = [
        head,
        f"<title>{escape(title)}</title>",
        _STYLE,
        f'<rect class="ground" width="860" height="{height}" rx="6"/>',
        f'<text x="16" y="26" font-weight="bold">{escape(title)}</text>',
    ]
    for i, row in enumerate(rows):
        y = _TOP + _ROW * i
        kind = "bar" if row.ratio <= 1 else "over"
        width = unit * row.ratio
        parts += [
            f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(row.label)}</text>',
            f'<rect class="{kind}" x="{_LEFT}" y="{y + 2}" width="{width:.1f}" height="15"/>',
            f'<text x="{_LEFT + width + 6:.1f}" y="{y + 13}">{escape(row.note)}</text>',
        ]
    x, bottom = _LEFT + unit, _TOP + _ROW * len(rows)
    parts += [
        f'<path d="M{x:.1f} {_TOP - 4}V{bottom + 4}" stroke="currentColor" stroke-dasharray="4"/>',
        f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{escape(ceiling)}</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)
