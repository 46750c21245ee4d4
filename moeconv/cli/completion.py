"""What can be said where a name is wanted? For the shell, which completes what is typed so far."""

from __future__ import annotations


def layouts(incomplete: str) -> list[str]:
    """Return the layouts that begin so."""
    from moeconv.layouts import LAYOUTS

    return [layout.id for layout in LAYOUTS if layout.id.startswith(incomplete)]


def families(incomplete: str) -> list[str]:
    """Return the families that begin so."""
    from moeconv.families import FAMILIES

    return [family.name for family in FAMILIES if family.name.startswith(incomplete)]


def shapes(incomplete: str) -> list[str]:
    """Return the models whose sizes `bench` has and that begin so."""
    from moeconv.bench.shapes import SHAPES

    return [shape.name for shape in SHAPES if shape.name.startswith(incomplete)]
