"""What are the routed experts of a layer, and where is each matrix of them kept?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeconv.checkpoint.types import Part, TensorRef, stored_shape
from moeconv.layouts.layout import Geometry

if TYPE_CHECKING:
    from moeconv.schemes.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Source:
    """Where one part of one projection is kept, for every expert.

    Attributes
    ----------
    refs
        One tensor an expert, or a single stack of all.
    stacked
        Whether it is a single stack.
    transposed
        Whether the matrix is stored as `[in, out]`.
    first, step, fused
        Which logical rows of a fused gate-and-up matrix are this projection's: every `step`-th
        from `first` times the rows of one projection on; `fused` projections share the rows.
    """

    refs: tuple[TensorRef, ...]
    stacked: bool
    transposed: bool
    first: int = 0
    step: int = 1
    fused: int = 1

    def of(self, experts: range) -> tuple[TensorRef, ...]:
        """Return the tensor of each expert; of a stack, the same for all."""
        if self.stacked:
            return self.refs * len(experts)
        return self.refs[experts.start : experts.stop]

    def part(self, expert: int) -> Part:
        """Return the whole matrix of one expert."""
        ref = self.refs[0] if self.stacked else self.refs[expert]
        stored_rows, stored_cols = stored_shape(ref.spec.shape[self.stacked :])
        total = stored_cols if self.transposed else stored_rows
        start = self.first if self.step > 1 else self.first * (total // self.fused)
        stop = total if self.step > 1 else start + total // self.fused
        taken = range(start, stop, self.step)
        rows, cols = (range(stored_rows), taken) if self.transposed else (taken, range(stored_cols))
        return Part(ref, expert if self.stacked else None, rows, cols, self.transposed)


@dataclass(frozen=True, slots=True)
class Stack:
    """The routed experts of one layer."""

    prefix: str
    layer: int
    geometry: Geometry
    scheme: Scheme
    sources: Mapping[tuple[str, str], Source]

    @property
    def names(self) -> frozenset[str]:
        """The source tensors it is made of."""
        return frozenset(ref.name for source in self.sources.values() for ref in source.refs)


@dataclass(frozen=True, slots=True)
class Experts:
    """The stacks of a checkpoint, and the expert tensors that are left as they are.

    Attributes
    ----------
    stacks
        A stack for every layer that the config promises, by layer.
    extra
        Tensors of experts that are left as they are: of MTP layers, of other parts of the model,
        of experts that compute nothing.
    """

    stacks: tuple[Stack, ...]
    extra: frozenset[str]
