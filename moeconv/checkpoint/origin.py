"""What is a place that the files of a checkpoint come from?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from moeconv.checkpoint.types import SourceFile, TensorRef
    from moeconv.ranges.rows import Numbers, Tables
    from moeconv.tensors import Bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file that will be read in one call."""

    file: str
    begin: int
    nbytes: int


class Ranges(Protocol):
    """Byte ranges of the files of a place; safe to use from several threads.

    Attributes
    ----------
    bytes_read
        How many were handed out so far.
    """

    bytes_read: int

    def read_range(self, file: str, begin: int, out: Bytes) -> int:
        """Fill `out` (contiguous bytes) from an offset on; return how many there were."""

    def read_rows(self, file: str, begins: Numbers, tables: Tables) -> int:
        """Fill rows from an offset each, where many at once are cheaper than one by one.

        Returns how many were filled, from the first on; the rest are to be read one by one.
        """

    def ahead(self, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """Fetch what the block will read, in the order in which it will."""

    def close(self) -> None:
        """Let go of files and connections."""


class Origin(Protocol):
    """A place: a directory, or a commit of a repository."""

    @property
    def where(self) -> str:
        """What a command names it by."""

    @property
    def name(self) -> str:
        """What to call the checkpoint."""

    @property
    def repo(self) -> str | None:
        """The repository on the Hub, where it is known."""

    @property
    def commit(self) -> str | None:
        """The commit of it."""

    @property
    def is_remote(self) -> bool:
        """Whether its bytes come over the network."""

    def top_names(self) -> list[str]:
        """Return the files at the top, sorted."""

    def holds(self, name: str) -> bool:
        """Say whether there is such a file, at the top or below."""

    def side_files(self) -> tuple[str, ...]:
        """Return what a converted directory keeps beside weights, sorted.

        Raises
        ------
        SourceError
            One of them cannot be kept.
        """

    def warnings(self, names: Sequence[str]) -> list[str]:
        """Return what is odd about these files, a sentence each."""

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the bytes of a small file.

        Raises
        ------
        SourceError
            It is not there, cannot be read, or is larger than that.
        """

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file.

        Raises
        ------
        SourceError
            It is not there, or cannot be read.
        """

    def headers(self, names: Sequence[str]) -> list[tuple[SourceFile, list[TensorRef]]]:
        """Return what each weight file is and which tensors it holds.

        Raises
        ------
        SourceError
            One is missing, cut short, or no safetensors file.
        """

    def open(self, ahead_bytes: int) -> Ranges:
        """Return byte ranges of its files, with memory for what is fetched ahead."""
