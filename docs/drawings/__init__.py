"""The pictures of the pages, each made by a function of no arguments."""

from __future__ import annotations

from typing import Final

from drawings.house import house
from drawings.layouts import marlin, overview, ranks, rows, uneven

DRAWINGS: Final = {
    "house.svg": house,
    "marlin.svg": marlin,
    "overview.svg": overview,
    "ranks.svg": ranks,
    "rows.svg": rows,
    "uneven.svg": uneven,
}
