"""What was measured, drawn from the recorded figures in docs/figures/."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Final

from moeconv.bench.svg import BLANK, INK, RANKS, box, label, line, picture

FIGURES: Final = Path(__file__).resolve().parent.parent / "figures"
LOADERS: Final = {"stock": RANKS[1], "moeconv": RANKS[0]}


def load_memory() -> str:
    """Device memory over time of an engine's own load and of a load by moeconv."""
    loads = json.loads((FIGURES / "load-memory.json").read_text())["loads"]
    left, top, width, height = 60, 40, 740, 250
    seconds = max(load["rows"][-1][0] for load in loads)
    most = 1.08 * max(row[2] for load in loads for row in load["rows"])

    def at(second: float, nbytes: float) -> tuple[float, float]:
        return left + width * second / seconds, top + height * (1 - nbytes / most)

    parts = [line([(left, top), (left, top + height), (left + width, top + height)])]
    for gigabytes in range(0, int(most / 1e9) + 1, 4):
        y = at(0, gigabytes * 1e9)[1]
        parts.append(label(left - 8, y + 4, f"{gigabytes} GB", 'text-anchor="end"'))
    for second in range(int(seconds) + 1):
        x = at(second, 0)[0]
        parts.append(label(x, top + height + 18, f"{second} s", 'text-anchor="middle"'))
    for load in loads:
        colour, name = LOADERS[load["loader"]], load["loader"]
        for column, weight in ((2, 1.0), (1, 2.2)):
            parts.append(line([at(row[0], row[column]) for row in load["rows"]], colour, weight))
        end = load["marks"]["ready"]
        x = at(end, 0)[0]
        parts.append(line([(x, top), (x, top + height)], colour, 0.8))
        text = f"{name}: ready after {end:.1f} s"
        anchor = 'text-anchor="end" ' if x > left + width / 2 else ""
        shift = -6 if anchor else 6
        parts.append(label(x + shift, top + 12, text, f'{anchor}fill="{colour}"'))
    peaks = ", ".join(f"{it['loader']} {it['peaks']['allocated'] / 1e9:.1f} GB" for it in loads)
    note = f"thick: allocated, each 10 ms (peaks between: {peaks}); thin: reserved by PyTorch"
    parts.append(label(left, 24, note, 'font-size="11"'))
    what = "GPU memory while vLLM loads an NVFP4 model, by its own loader and by moeconv's"
    return picture(830, top + height + 36, what, parts)


def beside_cp() -> str:
    """Time of whole conversions over that of cp, warm and cold."""
    runs = json.loads((FIGURES / "pipeline-2-cores.json").read_text())["runs"]
    left, unit = 150, 420
    parts = []
    for i, (name, run) in enumerate(runs.items()):
        y = 44 + 26 * i
        ours, theirs = (statistics.median(run["wall_s"][way]) for way in ("cpu-2", "cp"))
        share = ours / theirs
        size = run["source_bytes"] / 1e9
        parts += [
            label(left - 10, y + 14, f"{name}, {size:.1f} GB", 'text-anchor="end"'),
            box(left, y, (unit, 20), BLANK, 0.5),
            box(left, y, (unit * share, 20), RANKS[0]),
            label(left + unit * share - 6, y + 14, f"{share:.2f}", 'text-anchor="end" fill="#fff"'),
        ]
    bottom = 44 + 26 * len(runs)
    parts += [
        line([(left + unit, 38), (left + unit, bottom)], INK, 1.5),
        label(left + unit, 30, "cp -r", 'text-anchor="middle" font-weight="bold"'),
        label(left, bottom + 18, "time of a conversion over that of cp; two cores, medians of 3"),
    ]
    return picture(620, bottom + 30, "Conversions take less time than copying the files", parts)
