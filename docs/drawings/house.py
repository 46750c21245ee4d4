"""The rooms of the code and who may use whom, from the import rules and the rooms' own words."""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Final

from drawings.svg import arrow
from moeconv.bench.svg import BLANK, INK, RANKS, box, label, line, picture

ROOT: Final = Path(__file__).resolve().parent.parent.parent
LINE: Final = ("SRC", "Checkpoint", "Plan", "ShardRecords", "Manifest", "ok")
"""What the one line carries, and below: the calls that lead from each to the next."""
CALLS: Final = ("open_checkpoint", "plan_for", "convert", "seal", "verify")
WIDTH, LEFT, GAP = 960, 20, 5
LOW, ROW = 24, 11
"""Heights of a floor that a single room fills, and of a line of its question in any other."""


def house() -> str:
    """Floors of rooms under the line; a room uses rooms of the floors below it only."""
    parts = _line()
    top = 96
    for floor in _floors():
        width = (WIDTH - 2 * LEFT - 40 - GAP * (len(floor) - 1)) / len(floor)
        asked = [_asked(room, width) for room in floor]
        height = LOW + ROW * max(map(len, asked)) if len(floor) > 1 else LOW
        for i, room in enumerate(floor):
            parts += _room(room, asked[i], (LEFT + (width + GAP) * i, top), (width, height))
        top += height + GAP
    side = WIDTH - LEFT - 12
    parts += [
        line([(side, 96), (side, top - GAP)], INK, 1.5),
        line([(side - 5, top - GAP - 8), (side, top - GAP), (side + 5, top - GAP - 8)], INK, 1.5),
        label(side + 14, 96 + (top - 96) / 2, "imports", _turned(side + 14, 96 + (top - 96) / 2)),
    ]
    return picture(
        WIDTH, top + 10, "The line, and the rooms of the house by who may use whom", parts
    )


def _line() -> list[str]:
    """Return the line: its nouns as boxes, its verbs over the arrows."""
    width, parts = 108, []
    step = (WIDTH - 2 * LEFT - width) / (len(LINE) - 1)
    for i, noun in enumerate(LINE):
        x = LEFT + step * i
        parts.append(box(x, 38, (width, 28), RANKS[0]))
        style = 'text-anchor="middle" fill="#ffffff" font-weight="bold"'
        parts.append(label(x + width / 2, 56, noun, style))
        if i < len(CALLS):
            parts += arrow(x + width + 4, 52, step - width - 8)
            middle = x + width + (step - width) / 2
            parts.append(label(middle, 30, CALLS[i], 'text-anchor="middle" font-size="11"'))
    return parts


def _floors() -> list[list[str]]:
    """Return the rooms of each layer, from the import contract."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (rule["layers"] for rule in rules["contracts"] if rule["id"] == "layers")
    return [
        sorted(name for name in re.findall(r"\w+", layer) if _path(name) is not None)
        for layer in layers
    ]


def _path(room: str) -> Path | None:
    """Return the file that says what a room is for."""
    for path in (ROOT / f"moeconv/{room}.py", ROOT / f"moeconv/{room}/__init__.py"):
        if path.exists():
            return path
    return None


def _file(room: str) -> Path:
    path = _path(room)
    assert path is not None
    return path


def _asked(room: str, width: float) -> list[str]:
    """Return the question that a room answers, in lines that fit a width."""
    said = ast.get_docstring(ast.parse(_file(room).read_text())) or ""
    about = " ".join(said.split("\n\n")[0].split())
    question = re.split(r"(?<=[?.:;])\s", about)[0].rstrip(".:;").replace("`", "")
    return textwrap.wrap(question, int(width / 5.6))


def _room(
    room: str, asked: list[str], at: tuple[float, float], size: tuple[float, float]
) -> list[str]:
    """Return a room: its name, and below or beside it the question that it answers."""
    folder = _file(room).name == "__init__.py"
    x, y = at
    beside = 120 if size[1] == LOW else 0
    return [
        box(x, y, size, RANKS[2] if folder else BLANK, 0.35 if folder else 0.7),
        label(x + 6, y + 15, f"{room}/" if folder else room, 'font-weight="bold"'),
        *(
            label(x + 6 + beside, y + (15 if beside else 28) + ROW * i, text, 'font-size="9.5"')
            for i, text in enumerate(asked)
        ),
    ]


def _turned(x: float, y: float) -> str:
    return f'font-size="11" text-anchor="middle" transform="rotate(90 {x:g} {y:g})"'
