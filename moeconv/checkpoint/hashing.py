"""What is the SHA-256 of each weight file? A pass over all bytes, where it is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from moeconv.errors import SourceError

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint, SourceFile


def hashed(checkpoint: Checkpoint) -> Iterator[int | Checkpoint]:
    """Read each weight file; yields bytes as they are read, the checkpoint with digests last.

    A digest that the Hub or its cache gave keeps where it is from, and is confirmed.

    Raises
    ------
    SourceError
        A file cannot be read, or is not what the Hub or its cache say it is.
    """
    files: tuple[SourceFile, ...] = ()
    for file in checkpoint.files:
        files = (*files, (yield from _hashed(checkpoint, file)))
    yield replace(checkpoint, files=files)


def _hashed(checkpoint: Checkpoint, file: SourceFile) -> Generator[int, None, SourceFile]:
    sha256 = hashlib.sha256()
    for chunk in checkpoint.origin.chunks(file.name):
        sha256.update(chunk)
        yield len(chunk)
    found = sha256.hexdigest()
    if file.sha256 not in {None, found}:
        message = (
            f"`{file.name}` is damaged: expected SHA-256 {file.sha256} ({file.sha256_from}), "
            f"found {found}"
        )
        raise SourceError(message, hint="fetch this file again")
    where = f"{file.sha256_from} and read" if file.sha256 and not file.was_read else "read"
    return replace(file, sha256=found, sha256_from=file.sha256_from if file.was_read else where)
