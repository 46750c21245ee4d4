"""What the drawings need beside the elements of a chart: grids, arrows, brackets."""

from __future__ import annotations

from moeconv.bench.svg import BLANK, box, line


def grid(x: float, y: float, cell: tuple[float, float], count: tuple[int, int]) -> list[str]:
    """Return blank cells, `count` across and down: one rectangle and the lines between them."""
    width, height = cell[0] * count[0], cell[1] * count[1]
    down = "".join(f"M{x + cell[0] * i:g} {y:g}v{height:g}" for i in range(1, count[0]))
    across = "".join(f"M{x:g} {y + cell[1] * i:g}h{width:g}" for i in range(1, count[1]))
    return [
        box(x, y, (width, height), BLANK),
        f'<path class="edge" d="{down}{across}" fill="none" stroke-width="0.8"/>',
    ]


def arrow(x: float, y: float, length: float) -> list[str]:
    """Return an arrow to the right."""
    tip = x + length
    head = [(tip - 6, y - 4), (tip, y), (tip - 6, y + 4)]
    return [line([(x, y), (tip, y)]), line(head)]


def bracket(y: float, start: float, stop: float, colour: str) -> str:
    """Return a bracket under `[start, stop)`."""
    return line([(start, y), (start, y + 6), (stop, y + 6), (stop, y)], colour, 2)
