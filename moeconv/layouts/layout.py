"""What every layout says of itself: sizes, recipe, and which bytes a rank owns.

Terms: `E` experts, `H` hidden size, `I` intermediate size, `n = I / tp` a rank's share of it;
gate, up and down are the source projections, `w13` the fused gate and up, `w2` the down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from moeconv.layouts.verbs import Verb
from moeconv.tensors import TensorSpec

Order: TypeAlias = Literal["halves", "pairs"]
"""How gate and up rows stand in a fused source: `[gate; up]`, or `(gate 0, up 0, gate 1, …)`."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of one layer's routed experts."""

    experts: int
    hidden: int
    intermediate: int
    gated: bool
    order: Order = "halves"


@dataclass(frozen=True, slots=True)
class Slice:
    """The intermediate range `[start, stop)` that a file holds, and the order it is kept in.

    `stored` is the order from which any TP rank reads one range an expert; otherwise it is the
    engine's own order and padding for one rank.
    """

    start: int
    stop: int
    stored: bool

    @property
    def size(self) -> int:
        """Rows of gate (and of up) in the slice."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Matrix:
    """The source matrix that a verb wants: projections under each other, zero-padded.

    Attributes
    ----------
    projections
        `("gate", "up")`, `("up",)`, `("down",)` or, for pairs, `("gate_up",)`.
    part
        Which tensor of the quantisation scheme: `weight`, `weight_scale`, `bias`, …
    rows
        Rows of *each* projection, padding included.
    row_bytes
        Bytes a row, padding included.
    """

    projections: tuple[str, ...]
    part: str
    rows: int
    row_bytes: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all projections, and bytes a row."""
        return self.rows * len(self.projections), self.row_bytes

    @property
    def nbytes(self) -> int:
        """Size of the assembled matrix."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Output:
    """One engine parameter of one expert: where it comes from and how it is stored."""

    param: str
    spec: TensorSpec
    matrix: Matrix
    verb: Verb


@dataclass(frozen=True, slots=True)
class Placement:
    """How a rank's bytes of one expert go from the file into the engine's parameter.

    The range `[begin, end)` of the stored expert, seen as `stored`, is transposed by `axes` and
    lands in the leading corner of `final`; what is left of `final` is zero. Sizes are in items of
    `item_bytes`, which stay whole.
    """

    param: str
    spec: TensorSpec
    begin: int
    end: int
    stored: tuple[int, ...]
    axes: tuple[int, ...]
    final: tuple[int, ...]
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that takes the layout: versions, and what selects the kernel there."""

    name: str
    versions: str
    backend: str


class Layout(Protocol):
    """Byte order that an engine wants of one layer's routed experts; holds no state."""

    @property
    def id(self) -> str:
        """Name in commands, directories and manifests."""
        ...

    @property
    def version(self) -> int:
        """Raised whenever the bytes of the same source change."""
        ...

    @property
    def schemes(self) -> tuple[str, ...]:
        """Quantisation schemes it takes."""
        ...

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Engines that hold exactly these bytes."""
        ...

    def refusal(self, geometry: Geometry) -> str | None:
        """Say why experts of these sizes cannot have this layout."""
        ...

    def tp_refusal(self, geometry: Geometry, tp: int) -> str | None:
        """Say why an any-TP file cannot serve `tp` ranks."""
        ...

    def rank_slice(self, geometry: Geometry, tp: int, rank: int) -> Slice:
        """Return the intermediate range of a rank, in the engine's order."""
        ...

    def outputs(self, geometry: Geometry, part: Slice) -> tuple[Output, ...]:
        """Return the parameters of one expert, for one slice of its intermediate size."""
        ...

    def placements(self, geometry: Geometry, tp: int, rank: int) -> tuple[Placement, ...]:
        """Return what a rank reads of an expert in an any-TP file, a parameter each."""
        ...
