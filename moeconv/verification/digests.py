"""Are the bytes those that were written? Digests of experts, tensors and files; no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from moeconv.conversion.abreast import abreast
from moeconv.conversion.budget import PIECE_BYTES
from moeconv.errors import VerifyError
from moeconv.output.contents import by_file
from moeconv.output.manifest import TensorEntry

if TYPE_CHECKING:
    from moeconv.output.files import Files
    from moeconv.output.manifest import Entry, FileEntry, Manifest
    from moeconv.output.remote import RemoteModel
    from moeconv.tensors import Bytes

_AGAIN: Final = "copy this file again, or convert again"


@dataclass(frozen=True, slots=True)
class Subset:
    """Every `of`-th digest, from the `part`-th on: parts 1 to `of` together are all of them."""

    part: int = 1
    of: int = 1

    def has(self, number: int) -> bool:
        """Say whether a digest, numbered in the manifest's order, belongs to the part."""
        return number % self.of == self.part - 1


@dataclass(frozen=True, slots=True)
class Checked:
    """So many bytes were read, and so many digests were equal."""

    nbytes: int
    digests: int


def check_digests(
    files: Files | RemoteModel, manifest: Manifest, subset: Subset, *, width: int = 1
) -> Iterator[Checked]:
    """Compute digests again; yield what is done, every few megabytes.

    One pass over each file gives those of its experts and tensors, and where the subset is all, the
    file's own.

    Parameters
    ----------
    files
        Where the bytes are.
    manifest
        What the digests should be.
    subset
        Which of them to compute.
    width
        How many files are read at a time.

    Raises
    ------
    VerifyError
        A digest differs.
    """
    entries = by_file(manifest)
    streams, number = [], 0
    for held in manifest.files:
        mine = entries.get(held.path, [])
        streams.append(_check_file(files, held, mine, _Numbers(subset, number)))
        number += sum(len(_expected(entry)) for entry in mine)
    yield from abreast(streams, width)


@dataclass(frozen=True, slots=True)
class _Piece:
    """The bytes `[begin, end)` of one digest."""

    entry: Entry
    expert: int
    begin: int
    end: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Which digests of a file are wanted, the first of which has this number among all."""

    subset: Subset
    first: int

    def has(self, number: int) -> bool:
        return self.subset.has(self.first + number)


def _check_file(
    files: Files | RemoteModel, held: FileEntry, entries: Sequence[Entry], wanted: _Numbers
) -> Generator[Checked, None, None]:
    """Read a file once, for all digests of it that are wanted."""
    sha256 = hashlib.sha256() if wanted.subset.of == 1 else None
    buffer = np.empty(min(PIECE_BYTES, held.size), np.uint8)
    if sha256:
        end = min((entry.begin for entry in entries), default=held.size)
        for chunk in _chunks(files, held.path, (0, end), buffer):
            sha256.update(chunk)
    moved = equal = 0
    pieces = (piece for entry in entries for piece in _pieces(entry))
    for number, piece in enumerate(pieces):
        if wanted.has(number):
            xxh3 = xxhash.xxh3_128()
            for chunk in _chunks(files, held.path, (piece.begin, piece.end), buffer):
                xxh3.update(chunk)
                if sha256:
                    sha256.update(chunk)
                moved += len(chunk)
                if moved >= PIECE_BYTES:
                    yield Checked(moved, equal)
                    moved = equal = 0
            _check(xxh3.hexdigest(), piece)
            equal += 1
    if sha256:
        check_sha256(held, sha256.hexdigest())
        equal += 1
    yield Checked(moved, equal)


def check_sha256(held: FileEntry, found: str) -> None:
    """Compare a file's SHA-256 with the manifest's."""
    if found != held.sha256:
        message = f"`{held.path}` is damaged: expected SHA-256 {held.sha256}, found {found}"
        raise VerifyError(message, hint=_AGAIN)


def _expected(entry: Entry) -> tuple[str, ...]:
    """Return the digests of a tensor: one an expert, or one of all."""
    return entry.xxh3 if isinstance(entry, TensorEntry) else (entry.xxh3,)


def _pieces(entry: Entry) -> Iterator[_Piece]:
    """Yield the byte range of each digest of a tensor, and what it should be."""
    expected = _expected(entry)
    size = (entry.end - entry.begin) // max(len(expected), 1)
    for i, digest in enumerate(expected):
        yield _Piece(entry, i, entry.begin + i * size, entry.begin + (i + 1) * size, digest)


def _check(found: str, piece: _Piece) -> None:
    entry = piece.entry
    if found != piece.xxh3:
        first = entry.first if isinstance(entry, TensorEntry) else None
        what = "" if first is None else f"expert {first + piece.expert} of "
        message = (
            f"{what}`{entry.name}` in `{entry.file}` is damaged: expected XXH3 {piece.xxh3}, "
            f"found {found}"
        )
        raise VerifyError(message, hint=_AGAIN)


def _chunks(
    files: Files | RemoteModel, name: str, span: tuple[int, int], buffer: Bytes
) -> Iterator[memoryview]:
    begin, end = span
    for at in range(begin, end, max(buffer.nbytes, 1)):
        chunk = buffer[: min(buffer.nbytes, end - at)]
        files.read(name, at, chunk)
        yield memoryview(chunk)
