"""Zeros in place of a checkpoint's bytes, to try what is done with them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeconv.checkpoint.origin import Span
    from moeconv.ranges.rows import Numbers, Tables
    from moeconv.tensors import Bytes


class BlankRanges:
    """Every file, as long as it is asked for, and all zeros."""

    bytes_read = 0

    def read_range(self, file: str, begin: int, out: Bytes) -> int:
        """Fill `out` with zeros."""
        del file, begin
        out.fill(0)
        return out.nbytes

    def read_rows(self, file: str, begins: Numbers, tables: Tables) -> int:
        """Leave it to `read_range`."""
        del file, begins, tables
        return 0

    def ahead(self, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """Do nothing."""
        del spans
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""
