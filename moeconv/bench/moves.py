"""How fast do kernels lay out the experts of a model, beside a copy of the same bytes?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from moeconv.kernels.timing import Move, time_copy, time_kernels
from moeconv.layouts.layout import Facts, Geometry, Slice

if TYPE_CHECKING:
    from moeconv.bench.shapes import Shape
    from moeconv.layouts.layout import Layout
    from moeconv.layouts.verbs import Kernels

GPU_BYTES: Final = 1 << 31
"""Of both sides together: many times an H200's L2 of 60 MB."""

CPU_BYTES: Final = 1 << 28
"""Of both sides together: several times a server's L3."""

_ROUNDS: Final = 3

_NEUTRAL: Final = Facts((1.0, 1.0), scales=0, flushed=0, negative=0, differing=0)


@dataclass(frozen=True, slots=True)
class KernelFigure:
    """One parameter of a shape's experts, or all of them, moved by kernels.

    Attributes
    ----------
    what
        The parameter, as `w13_weight`, or `layer` for all of them after each other.
    nbytes
        Bytes read and written by a run.
    seconds, copy_seconds
        Median of a run, and of a copy that reads and writes as much, which took turns. On the host
        either takes one thread.
    """

    shape: str
    layout: str
    what: str
    kernels: str
    experts: int
    nbytes: int
    seconds: float
    copy_seconds: float

    @property
    def of_copy(self) -> float:
        """Share of the copy's speed."""
        return self.copy_seconds / self.seconds


def measure_kernels(kernels: Kernels, layout: Layout, shape: Shape) -> Iterator[KernelFigure]:
    """Time each parameter of a layout at a shape, but for global scales, then all of them."""
    geometry = _ordered(layout, shape.geometry)
    moves = {
        output.param: Move(
            layout.bind(output, _NEUTRAL, 0), output.matrix.shape, output.spec.nbytes
        )
        for output in layout.outputs(geometry, Slice(0, geometry.intermediate))
        if output.matrix.part != "global_scale"  # a number or two
    }
    experts = _experts(kernels, moves, shape)
    parts = {**{name: [move] for name, move in moves.items()}, "layer": [*moves.values()]}
    for what, some in parts.items():
        expert_bytes = sum(move.source[0] * move.source[1] + move.out_bytes for move in some)
        with _one_thread():
            turns = [
                (
                    time_kernels(kernels, some, experts),
                    time_copy(kernels.device, experts * expert_bytes),
                )
                for _ in range(_ROUNDS)
            ]
        yield KernelFigure(
            shape.name,
            layout.id,
            what,
            turns[0][0].way,
            experts,
            turns[0][0].nbytes,
            statistics.median(timing.seconds for timing, _ in turns),
            statistics.median(copy.seconds for _, copy in turns),
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch copy with one thread on the host, as one call of the kernels there runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ordered(layout: Layout, geometry: Geometry) -> Geometry:
    """Return the sizes with gate and up in an order that the layout's sources have."""
    sizes = (geometry.experts, geometry.hidden, geometry.intermediate, geometry.gated)
    return Geometry(*sizes, order=layout.orders[0])


def _experts(kernels: Kernels, moves: dict[str, Move], shape: Shape) -> int:
    """Return as many experts as make the bytes to move, of those there are."""
    most = CPU_BYTES if kernels.device == "cpu" else GPU_BYTES
    largest = max(move.source[0] * move.source[1] + move.out_bytes for move in moves.values())
    return max(1, min(shape.experts, most // largest))
