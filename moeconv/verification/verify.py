"""Is it still true? Structure, then digests, then the inverse and others against the source."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeconv.conversion.pipeline import Moved
from moeconv.output.codec import check_unchanged, manifest_bytes, parse_manifest
from moeconv.output.files import Files
from moeconv.output.manifest import Manifest
from moeconv.restoration.inverse import Lost, compare_with_source
from moeconv.restoration.witness import Witnessed
from moeconv.verification.digests import Subset, check_digests
from moeconv.verification.structure import check_structure

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Kernels

_MOST_ABREAST: Final = 8


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found true.

    Attributes
    ----------
    files, tensors
        How many of each the manifest holds.
    digests
        How many digests were computed again and found equal.
    sources
        How many source tensors were compared with what their converted bytes give back.
    lost
        Bytes that the layout cannot give back, by part; what is stored is what they give.
    witnessed
        How many experts' tensors were laid out by others too and found equal, by who did it.
    unwitnessed
        How many more of the sample nobody could lay out, where torch or FlashInfer is missing.
    others
        Files that the manifest does not name, and that no engine reads.
    """

    files: int
    tensors: int
    digests: int = 0
    sources: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    witnessed: dict[str, int] = field(default_factory=dict)
    unwitnessed: int = 0
    others: tuple[str, ...] = ()


def bytes_to_move(manifest: Manifest, *, read_data: Subset | None, source: bool) -> int:
    """Return about how many bytes a verification reads from the directory."""
    size = sum(entry.size for entry in manifest.files)
    return (size // read_data.of if read_data else 0) + size * int(source)


def verify(
    root: Path,
    kernels: Kernels,
    *,
    read_data: Subset | None = None,
    source: str | Path | None = None,
) -> Iterator[Moved | Verified]:
    """Verify a converted directory; yields bytes as they are done, the result last.

    Parameters
    ----------
    root
        The converted directory.
    kernels
        What inverts the layout.
    read_data
        Compute these digests again; `None` for none.
    source
        Compare the small files with those of this checkpoint, the inverse of every tensor with its
        tensors, byte for byte, and a sample of the experts with what others make of it.

    Raises
    ------
    SourceError
        There is no manifest, or the source cannot be read.
    VerifyError
        Something differs.
    """
    data = manifest_bytes(root)
    manifest = parse_manifest(data)
    check_unchanged(data)
    others = check_structure(root, manifest)
    digests = sources = 0
    lost, witnessed = Counter[str](), Counter[str | None]()
    with Files(root) as files:
        if read_data:
            for done in check_digests(files, manifest, read_data, width=_width()):
                digests += done.digests
                yield Moved(done.nbytes)
        if source is not None:
            for found in compare_with_source(files, manifest, kernels, source):
                match found:
                    case Moved():
                        yield found
                    case Lost(part, nbytes):
                        lost[part] += nbytes
                    case Witnessed():
                        witnessed[found.by] += 1
            sources = len({digest.name for digest in manifest.sources}) + len(manifest.weights)
    count = sum(1 for _ in manifest.entries())
    kept = {part: nbytes for part, nbytes in lost.items() if nbytes}
    named = {by: times for by, times in witnessed.items() if by}
    yield Verified(
        len(manifest.files), count, digests, sources, kept, named, witnessed[None], others
    )


def _width() -> int:
    """Return how many files are read at a time: SHA-256 takes a core longer than a disk."""
    return min(_MOST_ABREAST, os.cpu_count() or 1)
