"""Which pieces of which files go where? The reads that fill a rank's tensors, each of bounded size.

A run is one step of the work: `count` experts of one tensor, of each the same rows. It fits the
staging buffer, so that any number of tensors is filled through a few small ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from moeconv.output.manifest import TensorEntry
    from moeconv.serving.rank import RankTensor
    from moeconv.tensors import Bytes

    Items: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.void]]
    Window: TypeAlias = tuple[slice[int, int, None], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """How one expert's stored range lands in its parameter, in items of `item_bytes`.

    As `layouts.layout.Placement`, but a range that keeps its order is seen as plain bytes.
    """

    stored: tuple[int, ...]
    axes: tuple[int, ...]
    final: tuple[int, ...]
    item_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one step along the first stored axis: what is never cut."""
        return math.prod(self.stored[1:]) * self.item_bytes

    @property
    def is_plain(self) -> bool:
        """Whether the bytes keep their order."""
        return self.axes == (0,)

    def corner(self, rows: range) -> Window:
        """Return where stored rows land: the window of `final` that they fill."""
        parts = (rows, *(range(size) for size in self.stored[1:]))
        return tuple(slice(parts[axis].start, parts[axis].stop) for axis in self.axes)

    def tails(self) -> Iterator[Window]:
        """Yield the windows of `final` that the stored range leaves empty."""
        held = [self.stored[axis] for axis in self.axes]
        for i, (size, full) in enumerate(zip(held, self.final, strict=True)):
            if size < full:
                yield (*(slice(0, n) for n in held[:i]), slice(size, full))


@dataclass(frozen=True, slots=True)
class Run:
    """`count` experts from `expert` of the rank on, of each the stored rows `rows`.

    In the file they are `size` bytes every `step`, from `begin` on.
    """

    file: str
    begin: int
    step: int
    count: int
    size: int
    expert: int
    rows: range

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return self.count * self.size

    @property
    def is_contiguous(self) -> bool:
        """Whether it is one range of the file."""
        return self.count == 1 or self.step == self.size


def shape_of(tensor: RankTensor) -> Shape:
    """Return how an expert of the tensor is placed."""
    place = tensor.placement
    order = tuple(range(len(place.stored)))
    if place.axes == order and place.stored[1:] == place.final[1:]:
        return Shape((place.end - place.begin,), (0,), (place.spec.nbytes,), 1)
    return Shape(place.stored, place.axes, place.final, place.item_bytes)


def runs(tensor: RankTensor, shape: Shape, limit: int) -> Iterator[Run]:
    """Yield reads of about equal size, none above `limit` bytes if a row is not."""
    place = tensor.placement
    size = place.end - place.begin
    if not size:
        return
    most = shape.stored[0] if size <= limit else max(1, limit // shape.row_bytes)
    for entry, experts in held(tensor):
        step = expert_bytes(entry)
        at = entry.begin + place.begin - step * entry.first
        for several in _cut(experts, max(1, limit // size)):
            for rows in _cut(range(shape.stored[0]), most):
                yield Run(
                    entry.file,
                    at + step * several.start + rows.start * shape.row_bytes,
                    step,
                    len(several),
                    len(rows) * shape.row_bytes,
                    several.start - tensor.experts.start,
                    rows,
                )


def _cut(whole: range, most: int) -> Iterator[range]:
    """Yield the fewest pieces of at most `most`, equal but for the last."""
    if whole:
        each = math.ceil(len(whole) / math.ceil(len(whole) / most))
        for first in range(whole.start, whole.stop, each):
            yield range(first, min(first + each, whole.stop))


def held(tensor: RankTensor) -> Iterator[tuple[TensorEntry, range]]:
    """Yield each stored piece, and which of its experts the rank has."""
    for entry in tensor.pieces:
        first = max(entry.first, tensor.experts.start)
        yield entry, range(first, min(entry.last + 1, tensor.experts.stop))


def expert_bytes(entry: TensorEntry) -> int:
    """Return the size of one whole stored expert."""
    return (entry.end - entry.begin) // (entry.last - entry.first + 1)


def items(shape: Shape, raw: Bytes, dims: tuple[int, ...]) -> Items:
    """See bytes as items that stay whole."""
    return raw.reshape(-1).view(np.dtype(f"V{shape.item_bytes}")).reshape(dims)


def put(shape: Shape, run: Run, raw: Bytes, out: Bytes) -> None:
    """Place what a run read in the tensor `out` of all the rank's experts."""
    source = items(shape, raw, (run.count, len(run.rows), *shape.stored[1:]))
    target = items(shape, out, (-1, *shape.final))
    axes = (0, *(axis + 1 for axis in shape.axes))
    window = (slice(run.expert, run.expert + run.count), *shape.corner(run.rows))
    target[window] = source.transpose(axes)


def zero_tails(shape: Shape, out: Bytes) -> None:
    """Write the zeros with which the engine pads."""
    target = items(shape, out, (-1, *shape.final))
    for window in shape.tails():
        target[(slice(None), *window)] = np.zeros((), target.dtype)
