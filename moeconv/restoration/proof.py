"""Is a file of the source what it was? By the digests that the manifest keeps of all its bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import xxhash

from moeconv.conversion.budget import PIECE_BYTES
from moeconv.conversion.pipeline import Moved
from moeconv.errors import VerifyError

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.output.files import Files
    from moeconv.output.manifest import Manifest

    Digest: TypeAlias = tuple[int, int, str]


class Proof:
    """What every byte of the source's weight files and indexes should be.

    Digests are of ranges: tensors that passed through, experts as they were read, and what the
    sidecar keeps. Together they leave no byte out; where some overlap, those bytes are read twice.

    Parameters
    ----------
    manifest
        Of a converted directory with a sidecar.
    checkpoint
        What it was made of.
    """

    def __init__(self, manifest: Manifest, checkpoint: Checkpoint) -> None:
        found: dict[str, set[Digest]] = defaultdict(set)
        for kept in manifest.restore.kept if manifest.restore else ():
            end = kept.source_begin + kept.end - kept.begin
            found[kept.source].add((kept.source_begin, end, kept.xxh3))
        for weight in manifest.weights:
            if ref := checkpoint.tensors.get(weight.name):
                found[ref.file].add((ref.begin, ref.begin + ref.spec.nbytes, weight.xxh3))
        for digest in manifest.sources:
            if ref := checkpoint.tensors.get(digest.name):
                at = ref.begin
                found[ref.file].add((at + digest.begin, at + digest.end, digest.xxh3))
        self._digests = {file: sorted(digests) for file, digests in found.items()}
        self._piece = np.empty(PIECE_BYTES, np.uint8)

    def holds(self, files: Files, name: str, size: int) -> Generator[Moved, None, bool]:
        """Say whether all `size` bytes of a file are the source's; yields them as they are read.

        Where they are not, what was yielded is taken back.
        """
        seen = 0
        for begin, end, xxh3 in self._digests.get(name, []):
            if begin > seen or not self._is_equal(files, name, (begin, end, xxh3)):
                break
            yield Moved(max(end - seen, 0))
            seen = max(seen, end)
        if seen != size:
            yield Moved(-seen)
        return seen == size

    def _is_equal(self, files: Files, name: str, digest: Digest) -> bool:
        begin, end, expected = digest
        found = xxhash.xxh3_128()
        for at in range(begin, end, PIECE_BYTES):
            piece = self._piece[: min(PIECE_BYTES, end - at)]
            try:
                files.read(name, at, piece)
            except VerifyError:  # it cannot be read, or is shorter by now
                return False
            found.update(piece)
        return found.hexdigest() == expected
