"""The pictures of the pages, each made by a function of no arguments."""

from __future__ import annotations

from typing import Final

from drawings.charts import beside_cp, load_memory
from drawings.house import house
from drawings.layouts import marlin, overview, ranks, rows, uneven

DRAWINGS: Final = {
    "beside-cp.svg": beside_cp,
    "house.svg": house,
    "load-memory.svg": load_memory,
    "marlin.svg": marlin,
    "overview.svg": overview,
    "ranks.svg": ranks,
    "rows.svg": rows,
    "uneven.svg": uneven,
}
