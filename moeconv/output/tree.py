"""What does the Hub say of a file that it has?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """A file in the Hub's tree: `sha256` of large files, `blob_id` (git's SHA-1) of small ones."""

    size: int
    sha256: str | None
    blob_id: str

    def is_of(self, size: int, sha256: str) -> bool:
        """Say whether it is a large file of this size and digest."""
        return self.sha256 == sha256 and self.size == size

    def is_content(self, data: bytes) -> bool:
        """Say whether it has just these bytes."""
        if self.sha256 is not None:
            return self.is_of(len(data), hashlib.sha256(data).hexdigest())
        header = b"blob %d\0" % len(data)
        return self.blob_id == hashlib.sha1(header + data, usedforsecurity=False).hexdigest()


def holds(tree: Mapping[str, Held], path: str, size: int, sha256: str) -> bool:
    """Say whether a tree has a large file of this size and digest at a path."""
    held = tree.get(path)
    return held is not None and held.is_of(size, sha256)
