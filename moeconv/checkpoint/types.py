"""The nouns of a source checkpoint: where each tensor's bytes are, and which of them are wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from moeconv.tensors import BITS, TensorSpec

if TYPE_CHECKING:
    from moeconv.checkpoint.origin import Origin

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor of a checkpoint: `spec.nbytes` bytes from `begin` in `file`."""

    name: str
    spec: TensorSpec
    file: str
    begin: int


def stored_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return what a tensor of one expert is as a matrix: a vector or a scalar is one column."""
    if not shape:
        return 1, 1
    rows, *rest = shape
    return rows, math.prod(rest)


@dataclass(frozen=True, slots=True)
class Part:
    """A 2-D piece of a source tensor, as the stored rows and columns that hold it.

    A per-expert matrix, one expert of a stack, one half of a fused projection and the slice of
    a tensor-parallel rank are all the same thing: a tensor and an index into it.

    Attributes
    ----------
    ref
        The tensor. Axes after the row axis count as one: `[E, 2I, H/32, 16]` is `E` matrices
        of `[2I, H/2]`. A vector or scalar is one column.
    expert
        Index on the leading axis of a stack; `None` where the tensor is one expert's.
    rows, cols
        What is taken of the *stored* axes, in elements.
    transposed
        The matrix is stored as `[in, out]`; the logical one is its transpose.
    """

    ref: TensorRef
    expert: int | None
    rows: range
    cols: range
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Rows and columns of the whole stored matrix, in elements."""
        return stored_shape(self.ref.spec.shape[self.expert is not None :])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the logical matrix, in elements."""
        size = (len(self.rows), len(self.cols))
        return size[::-1] if self.transposed else size

    @property
    def item_bytes(self) -> int:
        """Bytes an element (an `F4` pair counts as one byte-wide element of half the columns)."""
        return BITS[self.ref.spec.dtype] // 8

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the whole stored matrix."""
        rows, cols = self.stored_shape
        return rows * cols * self.item_bytes

    @property
    def span(self) -> tuple[int, int]:
        """Byte range within the tensor that holds the taken rows, whole rows only."""
        rows, cols = self.stored_shape
        pitch = cols * self.item_bytes
        first = (self.expert or 0) * rows + self.rows.start
        return first * pitch, (first + self.rows[-1] + 1 - self.rows.start) * pitch

    @property
    def is_whole_rows(self) -> bool:
        """Whether the bytes of `span` are the logical matrix as they are."""
        return (
            not self.transposed and self.rows.step == 1 and len(self.cols) == self.stored_shape[1]
        )


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A weight file: its size, and digests that tell two checkpoints of one shape apart.

    Attributes
    ----------
    probe_xxh3
        Of a few places of the data; `None` where they were not read.
    sha256
        Of the whole file; `None` where it is not known.
    sha256_from
        Where that is from: `hub metadata`, `cache blob name`, `read`, or the first two with
        ` and read`, where reading the file confirmed it.
    """

    name: str
    size: int
    header_sha256: str
    probe_xxh3: str | None
    sha256: str | None = None
    sha256_from: str | None = None

    @property
    def is_told(self) -> bool:
        """Whether the Hub gave its SHA-256."""
        return (self.sha256_from or "").startswith("hub metadata")

    @property
    def was_read(self) -> bool:
        """Whether the whole file was read for its SHA-256."""
        return (self.sha256_from or "").endswith("read")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose headers were read and agree with each other.

    Attributes
    ----------
    origin
        Where its bytes come from.
    name
        What to call it: the name of the directory or the repository.
    config
        `config.json`, decoded.
    tensors
        Every tensor by name.
    files
        The weight files, sorted by name.
    side_files
        Everything else that a converted directory keeps, relative to its root.
    warnings
        What is odd about it, a sentence each, but harmless.
    indexes
        Size of each index of the weight files, by name.
    asked
        The branch, tag or commit of a repository that was asked for.
    notes
        What a person should know of how it was found, a sentence each.
    """

    origin: Origin
    name: str
    config: Mapping[str, Json]
    tensors: Mapping[str, TensorRef]
    files: tuple[SourceFile, ...]
    side_files: tuple[str, ...]
    warnings: tuple[str, ...] = field(default=())
    indexes: Mapping[str, int] = field(default_factory=dict)
    asked: str | None = None
    notes: tuple[str, ...] = field(default=())
