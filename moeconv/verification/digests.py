"""Are the bytes those that were written? Digests of experts, tensors and files; no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from moeconv.conversion.budget import PIECE_BYTES
from moeconv.conversion.pipeline import Moved
from moeconv.errors import VerifyError
from moeconv.output.contents import by_file
from moeconv.output.manifest import TensorEntry

if TYPE_CHECKING:
    from moeconv.output.files import Files
    from moeconv.output.manifest import Entry, FileEntry, Manifest
    from moeconv.output.remote import RemoteModel

_AGAIN: Final = "copy this file again, or convert again"


@dataclass(frozen=True, slots=True)
class Subset:
    """Every `of`-th digest, from the `part`-th on: parts 1 to `of` together are all of them."""

    part: int = 1
    of: int = 1

    def has(self, number: int) -> bool:
        """Say whether a digest, numbered in the manifest's order, belongs to the part."""
        return number % self.of == self.part - 1


def check_digests(
    files: Files | RemoteModel, manifest: Manifest, subset: Subset
) -> Iterator[Moved | str]:
    """Compute digests again; yield bytes, and each equal digest.

    One pass over each file gives those of its experts and tensors, and where the subset is all, the
    file's own.

    Raises
    ------
    VerifyError
        A digest differs.
    """
    entries = by_file(manifest)
    number = 0
    for held in manifest.files:
        sha256 = hashlib.sha256() if subset.of == 1 else None
        mine = entries.get(held.path, [])
        header_end = min((entry.begin for entry in mine), default=held.size)
        if sha256:
            for chunk in _chunks(files, held.path, 0, header_end):
                sha256.update(chunk)
        for entry in mine:
            for expert, (begin, end, expected) in enumerate(_digests(entry)):
                if subset.has(number):
                    xxh3 = xxhash.xxh3_128()
                    for chunk in _chunks(files, held.path, begin, end):
                        xxh3.update(chunk)
                        if sha256:
                            sha256.update(chunk)
                        yield Moved(len(chunk))
                    _check(xxh3.hexdigest(), expected, entry, expert)
                    yield expected
                number += 1
        if sha256:
            check_sha256(held, sha256.hexdigest())
            yield held.sha256


def check_sha256(held: FileEntry, found: str) -> None:
    """Compare a file's SHA-256 with the manifest's."""
    if found != held.sha256:
        message = f"`{held.path}` is damaged: expected SHA-256 {held.sha256}, found {found}"
        raise VerifyError(message, hint=_AGAIN)


def _digests(entry: Entry) -> Iterator[tuple[int, int, str]]:
    """Yield the byte range of each digest of a tensor, and what it should be."""
    expected = entry.xxh3 if isinstance(entry, TensorEntry) else (entry.xxh3,)
    size = (entry.end - entry.begin) // max(len(expected), 1)
    for i, digest in enumerate(expected):
        yield entry.begin + i * size, entry.begin + (i + 1) * size, digest


def _check(found: str, expected: str, entry: Entry, expert: int) -> None:
    if found != expected:
        what = f"expert {entry.first + expert} of " if isinstance(entry, TensorEntry) else ""
        message = (
            f"{what}`{entry.name}` in `{entry.file}` is damaged: expected XXH3 {expected}, "
            f"found {found}"
        )
        raise VerifyError(message, hint=_AGAIN)


def _chunks(files: Files | RemoteModel, name: str, begin: int, end: int) -> Iterator[memoryview]:
    buffer = np.empty(min(PIECE_BYTES, end - begin), np.uint8)
    for at in range(begin, end, max(buffer.nbytes, 1)):
        chunk = buffer[: min(buffer.nbytes, end - at)]
        files.read(name, at, chunk)
        yield memoryview(chunk)
