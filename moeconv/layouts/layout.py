"""What every layout says of itself: sizes, recipe, and which bytes a rank owns.

Terms: `E` experts, `H` hidden size, `I` intermediate size, `n = I / tp` a rank's share of it;
gate, up and down are the source projections, `w13` the fused gate and up, `w2` the down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from moeconv.layouts.verbs import Verb
from moeconv.tensors import TensorSpec

if TYPE_CHECKING:
    import numpy as np

    Counts: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    Floats: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

Order: TypeAlias = Literal["halves", "pairs"]
"""How gate and up rows stand in a fused source: `[gate; up]`, or `(gate 0, up 0, gate 1, …)`."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of one layer's routed experts, and what of their storage decides bytes.

    Attributes
    ----------
    reciprocal
        Global scales are stored as `1 / scale` (compressed-tensors).
    scale_bytes
        Bytes of a block scale in the source: 1, or more where a power of two is stored as a float.
    """

    experts: int
    hidden: int
    intermediate: int
    gated: bool
    order: Order = "halves"
    reciprocal: bool = False
    scale_bytes: int = 1


@dataclass(frozen=True, slots=True)
class Slice:
    """The intermediate range `[start, stop)` that a file holds, and the order it is kept in.

    Attributes
    ----------
    padded
        The size that the engine pads the range to, in whose order it is then kept; `None` for the
        stored order, from which any TP rank reads one range an expert.
    """

    start: int
    stop: int
    padded: int | None = None

    @property
    def size(self) -> int:
        """Rows of gate (and of up) in the slice."""
        return self.stop - self.start

    @property
    def stored(self) -> bool:
        """Whether it is kept in the stored order."""
        return self.padded is None


@dataclass(frozen=True, slots=True)
class Survey:
    """What is counted of a layer's experts before they are laid out.

    Attributes
    ----------
    counts
        How often each byte occurs among an expert's block scales, `[E, 256]`, by projection.
    scales
        Global scales as stored, `[E]`, by projection.
    reciprocal
        They are stored as `1 / scale`.
    inexact
        Experts with a block scale that is a float and no power of two, by projection.
    """

    counts: Mapping[str, Counts]
    scales: Mapping[str, Floats]
    reciprocal: bool
    inexact: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a layout learned from a survey, and what it will not keep.

    Attributes
    ----------
    factors
        The power of two taken out of the block scales of w13 and of w2.
    scales
        Block scales in all.
    flushed, negative
        Positive scales that become zero, and scales below zero or NaN.
    differing
        Experts whose gate and up have different global scales.
    ratios
        With `--reconcile-scales`, what gate's and up's block scales are multiplied by, an expert
        each; empty otherwise.
    lossy
        Projections and experts whose block scales do not all come back.
    unsound
        Global scales that are NaN, infinite, zero or negative, or whose reciprocal is, where that
        is what they are stored as.
    """

    factors: tuple[float, float]
    scales: int
    flushed: int
    negative: int
    differing: int
    ratios: tuple[tuple[float, float], ...] = ()
    lossy: tuple[tuple[str, int], ...] = ()
    unsound: int = 0


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
    blank
        All zeros; nothing is read.
    """

    projections: tuple[str, ...]
    part: str
    rows: int
    row_bytes: int
    blank: bool = False

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
    lands in the leading corner of `final`; what is left of `final` is zero, all of it where the
    range is empty. Sizes are in items of `item_bytes`, which stay whole.
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
    def command(self) -> str:
        """The command that makes it."""
        ...

    @property
    def version(self) -> int:
        """Raised whenever the bytes of the same source change."""
        ...

    @property
    def dtype(self) -> str:
        """The serving dtype that the bytes are for: `bfloat16` or `float16`."""
        ...

    @property
    def schemes(self) -> tuple[str, ...]:
        """Quantisation schemes it takes."""
        ...

    @property
    def leaves(self) -> tuple[str, ...]:
        """Schemes of layers that it leaves as they are, beside those it takes."""
        ...

    @property
    def orders(self) -> tuple[Order, ...]:
        """Orders of gate and up in the source that it takes."""
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

    def rank_refusal(self, geometry: Geometry, tp: int) -> str | None:
        """Say why no file can be made for `tp` ranks."""
        ...

    def rank_slice(self, geometry: Geometry, tp: int, rank: int) -> Slice:
        """Return the intermediate range of a rank, in the engine's order."""
        ...

    def outputs(self, geometry: Geometry, part: Slice) -> tuple[Output, ...]:
        """Return the parameters of one expert, for one slice of its intermediate size."""
        ...

    def surveyed(self, geometry: Geometry, part: Slice) -> tuple[Matrix, ...]:
        """Return the matrices of each expert that a survey reads; none if none is needed."""
        ...

    def survey(self, survey: Survey) -> Facts:
        """Return what follows from a survey of all experts of a layer."""
        ...

    def bind(self, output: Output, facts: Facts, expert: int) -> Verb:
        """Return an output's verb for one expert, by the facts of its layer."""
        ...

    def placements(self, geometry: Geometry, tp: int, rank: int) -> tuple[Placement, ...]:
        """Return what a rank reads of an expert in an any-TP file, a parameter each."""
        ...
