"""Zeros in place of a checkpoint's bytes, to try what is done with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeconv.checkpoint.origin import Span
    from moeconv.tensors import Bytes


class BlankRanges:
    """Every file, as long as it is asked for, and all zeros."""

    bytes_read = 0

    def read_range(self, file: str, begin: int, out: Bytes) -> int:
        """Fill `out` with zeros."""
        del file, begin
        out.fill(0)
        return out.nbytes

    def read_together(self, file: str, ranges: Sequence[tuple[int, Bytes]]) -> int:
        """Do nothing: there are no more than one."""
        del file, ranges
        return 0

    def ahead(self, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """Do nothing."""
        del spans
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""
