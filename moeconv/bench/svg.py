"""The few SVG elements that pictures are made of, readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from xml.sax.saxutils import escape

RANKS: Final = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
"""Fills that carry a meaning; each reads on both grounds."""
INK: Final = "currentColor"
BLANK: Final = "blank"
"""Fill of what is there but not meant."""

STYLE: Final = (
    "<style>"
    "svg{color:#222;fill:#222}.ground{fill:#fbfbfa}.blank{fill:#dddcd7}.edge{stroke:#fff}"
    "@media(prefers-color-scheme:dark){"
    "svg{color:#ddd;fill:#ddd}.ground{fill:#181a1f}.blank{fill:#43464e}.edge{stroke:#181a1f}"
    "}</style>"
)


def picture(width: int, height: int, what: str, parts: Iterable[str]) -> str:
    """Return a whole SVG file; its colours follow the reader's light or dark setting."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif" '
        f'font-size="12" role="img">'
    )
    title = f"<title>{escape(what)}</title>"
    ground = f'<rect class="ground" width="{width}" height="{height}" rx="6"/>'
    return "\n".join((head, title, STYLE, ground, *parts, "</svg>\n"))


def box(x: float, y: float, size: tuple[float, float], fill: str, opacity: float = 1) -> str:
    """Return a filled rectangle with a thin edge in the colour of the ground."""
    width, height = size
    blank = fill == BLANK
    paint = 'class="blank edge"' if blank else f'class="edge" fill="{fill}"'
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {paint} '
        f'fill-opacity="{opacity:g}" stroke-width="0.8"/>'
    )


def label(x: float, y: float, text: str, style: str = "") -> str:
    """Return a text; `style` holds further SVG attributes."""
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def line(points: Iterable[tuple[float, float]], colour: str = INK, width: float = 1) -> str:
    """Return a line through points."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'
