"""Rows of bytes that one compiled call goes through: where in memory is each, and how long?"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    from moeconv.tensors import Bytes

    Numbers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

T = TypeVar("T")

Tables: TypeAlias = "Sequence[Bytes]"
"""Tables `[n, bytes]` of as many rows, which are taken row by row: the first of each table, then
the second of each. The bytes of a row follow each other; rows may be further apart."""

MANY: Final = 4
"""So many rows are worth one call: threads that hand the interpreter on each time are slow."""

_WORTH_BYTES: Final = 1 << 20
"""So much is worth a quarter of a second, in which compiled loops are loaded."""


def row_by_row(columns: Iterable[Iterable[T]]) -> Iterator[T]:
    """Yield the first of each column, then the second of each."""
    return chain.from_iterable(zip(*columns, strict=True))


def are_many(tables: Tables) -> bool:
    """Say whether one compiled call is worth while for all rows."""
    if sum(len(table) for table in tables) < MANY:
        return False
    return "numba" in sys.modules or sum(table.nbytes for table in tables) >= _WORTH_BYTES


def row_addresses(tables: Tables) -> Numbers:
    """Return where each row is in memory, which is there as long as the tables are."""
    if not all(table.strides[1] == 1 for table in tables if table.shape[1] > 1):
        message = "bytes of a row do not follow each other"
        raise AssertionError(message)
    starts = [(table.__array_interface__["data"][0], table.strides[0]) for table in tables]
    rows = range(len(tables[0]))
    return np.array([first + row * apart for row in rows for first, apart in starts], np.int64)


def row_sizes(tables: Tables) -> Numbers:
    """Return how many bytes each row has."""
    return np.array([table.shape[1] for table in tables] * len(tables[0]), np.int64)
