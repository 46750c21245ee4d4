"""The one place where source bytes enter.

Bytes go by `preadv` into memory that the caller owns and reuses. A memory map would count every
page of the checkpoint as resident, and a fresh buffer per tensor fragments the heap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeAlias

import numpy as np

from moeconv.errors import SourceError
from moeconv.ranges.rows import row_by_row

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from moeconv.checkpoint.origin import Ranges, Span
    from moeconv.checkpoint.types import Checkpoint, Part, TensorRef
    from moeconv.tensors import Bytes

    Items: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.void]]

_TILE = 64
"""Rows and columns of a tile when a matrix is transposed: one cache line of 16-bit items."""


AHEAD_BYTES: Final = 1 << 26
"""Memory for what is fetched ahead from afar, where nothing says how much there is."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Bytes of tensors, and where they go.

    Attributes
    ----------
    refs, begins
        The tensor of each row, and its byte that the row starts with.
    out
        `[n, bytes]`; the bytes of a row follow each other, rows may be further apart.
    """

    refs: Sequence[TensorRef]
    begins: Sequence[int]
    out: Bytes

    def singly(self) -> Iterator[Rows]:
        """Yield each row by itself."""
        for i, (ref, begin) in enumerate(zip(self.refs, self.begins, strict=True)):
            yield Rows((ref,), (begin,), self.out[i : i + 1])


def reader_for(checkpoint: Checkpoint, ahead_bytes: int = AHEAD_BYTES) -> Reader:
    """Open a checkpoint's tensor bytes, wherever they are."""
    return Reader(checkpoint.origin.open(ahead_bytes))


class Reader:
    """Reads tensors of one checkpoint; safe to use from several threads."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ranges.close()

    @property
    def bytes_read(self) -> int:
        """How many bytes were read so far."""
        return self._ranges.bytes_read

    def ahead(self, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """Fetch what the block will read, in the order in which it will, where that helps."""
        return self._ranges.ahead(spans)

    def read(self, ref: TensorRef, begin: int, out: Bytes) -> None:
        """Fill `out` (contiguous bytes) from byte `begin` of the tensor on.

        Raises
        ------
        SourceError
            The file ended early or cannot be read.
        """
        with _naming(ref):
            done = self._ranges.read_range(ref.file, ref.begin + begin, out)
        if done < out.nbytes:
            message = (
                f"`{ref.file}` ended inside `{ref.name}`: expected {out.nbytes} bytes at "
                f"{ref.begin + begin}, found {done}"
            )
            raise SourceError(message, hint="did the source change while it was converted?")

    def read_rows(self, tables: Sequence[Rows]) -> None:
        """Do what `read` does for many rows: the first of each table, then the second of each."""
        refs = list(row_by_row(rows.refs for rows in tables))
        file = refs[0].file
        if any(ref.file != file for ref in refs):
            singles = row_by_row(rows.singly() for rows in tables)
            for _, of_a_file in groupby(singles, lambda rows: rows.refs[0].file):
                self.read_rows(list(of_a_file))
            return
        starts = row_by_row(rows.begins for rows in tables)
        begins = [ref.begin + start for ref, start in zip(refs, starts, strict=True)]
        outs = [rows.out for rows in tables]
        with _naming(refs[0]):
            done = self._ranges.read_rows(file, np.array(begins, np.int64), outs)
        for i in range(done, len(refs)):
            row, table = divmod(i, len(tables))
            self.read(refs[i], begins[i] - refs[i].begin, outs[table][row])

    def read_part(self, part: Part, out: Bytes, scratch: Bytes) -> Bytes:
        """Put the logical matrix of `part` into `out` and return the bytes that were read.

        Parameters
        ----------
        part
            What to read.
        out
            `[rows, row bytes]` of the logical matrix; rows may be further apart than they are long.
        scratch
            Contiguous bytes, as many as `scratch_bytes` says.

        Returns
        -------
        Bytes
            The contiguous source bytes of `part.span`, for a digest; valid until the next read.
        """
        begin, end = part.span
        if part.is_whole_rows and out.flags.c_contiguous:
            flat = out.reshape(-1)
            self.read(part.ref, begin, flat)
            return flat
        raw = scratch[: end - begin]
        self.read(part.ref, begin, raw)
        items = raw.view(f"V{part.item_bytes}").reshape(-1, part.stored_shape[1])
        taken = items[:: part.rows.step, part.cols.start : part.cols.stop : part.cols.step]
        _copy(out.view(items.dtype), taken.T if part.transposed else taken)
        return raw


@contextmanager
def _naming(ref: TensorRef) -> Iterator[None]:
    """Say which tensor the system could not read."""
    try:
        yield
    except OSError as error:
        message = f"`{ref.file}` cannot be read at `{ref.name}`: {error.strerror}"
        raise SourceError(message) from error


def put_part(part: Part, matrix: Bytes, stored: Bytes) -> None:
    """Put the logical matrix of a part back where `read_part` takes it from.

    Parameters
    ----------
    part
        Where it goes.
    matrix
        `[rows, row bytes]` of the logical matrix; rows may be further apart than they are long.
    stored
        The whole stored matrix, contiguous: of a stack, that of the part's expert.
    """
    items = stored.view(f"V{part.item_bytes}").reshape(part.stored_shape)
    taken = items[
        part.rows.start : part.rows.stop : part.rows.step,
        part.cols.start : part.cols.stop : part.cols.step,
    ]
    source = matrix.view(items.dtype)
    _copy(taken, source.T if part.transposed else source)


def scratch_bytes(part: Part, row_bytes: int) -> int:
    """Return the bytes that `read_part` needs beside an output with rows `row_bytes` apart."""
    begin, end = part.span
    is_adjacent = part.is_whole_rows and part.shape[1] * part.item_bytes == row_bytes
    return 0 if is_adjacent else end - begin


def _copy(out: Items, source: Items) -> None:
    """Copy a strided matrix, a transposed one in tiles, so that each cache line is read once."""
    width = source.dtype.itemsize
    if width in {1, 2, 4, 8}:
        # Numpy copies integers by the word, but items of a void dtype one call at a time.
        out, source = out.view(f"u{width}"), source.view(f"u{width}")
    if source.strides[1] <= source.strides[0]:
        np.copyto(out, source)
        return
    for row in range(0, source.shape[0], _TILE):
        np.copyto(out[row : row + _TILE], source[row : row + _TILE])
