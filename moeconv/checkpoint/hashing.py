"""What is the SHA-256 of each weight file? A pass over all bytes, where it is asked for."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from moeconv.errors import SourceError

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint, SourceFile


def hashed(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the SHA-256 of each weight file, as it was read.

    Raises
    ------
    SourceError
        A file cannot be read, or is not what the Hub or its cache say it is.
    """
    return replace(checkpoint, files=tuple(_hashed(checkpoint, it) for it in checkpoint.files))


def _hashed(checkpoint: Checkpoint, file: SourceFile) -> SourceFile:
    sha256 = hashlib.sha256()
    for chunk in checkpoint.origin.chunks(file.name):
        sha256.update(chunk)
    found = sha256.hexdigest()
    if file.sha256 not in {None, found}:
        message = (
            f"`{file.name}` is damaged: expected SHA-256 {file.sha256} ({file.sha256_from}), "
            f"found {found}"
        )
        raise SourceError(message, hint="fetch this file again")
    return replace(file, sha256=found, sha256_from="read")
