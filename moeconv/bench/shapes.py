"""Which sizes are worth measuring? Those of models that people serve, from their `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeconv.errors import UnsupportedError
from moeconv.layouts.layout import Geometry


@dataclass(frozen=True, slots=True)
class Shape:
    """The experts of one layer of a model."""

    name: str
    experts: int
    hidden: int
    intermediate: int

    @property
    def geometry(self) -> Geometry:
        """As layouts take it: with a gate."""
        return Geometry(self.experts, self.hidden, self.intermediate, gated=True)


SHAPES: Final = (
    Shape("qwen3-30b-a3b", 128, 2048, 768),
    Shape("qwen3-235b-a22b", 128, 4096, 1536),
    Shape("gpt-oss-120b", 128, 2880, 2880),
    Shape("deepseek-v3", 256, 7168, 2048),
    Shape("kimi-k2", 384, 7168, 2048),
)


def find_shape(name: str) -> Shape:
    """Return the shape `name`, or the one that begins so.

    Raises
    ------
    UnsupportedError
        There is none, or several begin so.
    """
    found = [shape for shape in SHAPES if name and shape.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    message = f"`{name}` is no shape to measure"
    raise UnsupportedError(message, hint=f"known: {', '.join(shape.name for shape in SHAPES)}")
