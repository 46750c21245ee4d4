"""Is it still true? Structure, then digests, then the inverse against the source."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from moeconv.budget import PIECE_BYTES
from moeconv.checkpoint.header import read_header
from moeconv.checkpoint.sidefiles import WEIGHT_SUFFIXES
from moeconv.errors import SourceError, VerifyError
from moeconv.inverse import compare_with_source
from moeconv.output.files import Files
from moeconv.output.manifest import (
    MANIFEST_NAME,
    WORK_FOLDER,
    Manifest,
    TensorEntry,
    WeightEntry,
    read_manifest,
)
from moeconv.pipeline import Moved

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Kernels
    from moeconv.output.remote import RemoteModel


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
    """

    files: int
    tensors: int
    digests: int = 0
    sources: int = 0
    lost: dict[str, int] = field(default_factory=dict)


def bytes_to_move(manifest: Manifest, *, read_data: bool, source: bool) -> int:
    """Return how many bytes a verification reads from the directory."""
    return sum(entry.size for entry in manifest.files) * (int(read_data) + int(source))


def verify(
    root: Path, kernels: Kernels, *, read_data: bool = False, source: Path | None = None
) -> Iterator[Moved | Verified]:
    """Verify a converted directory; yields bytes as they are done, the result last.

    Parameters
    ----------
    root
        The converted directory.
    kernels
        What inverts the layout.
    read_data
        Compute every digest again.
    source
        Compare the inverse of every tensor with this checkpoint, byte for byte.

    Raises
    ------
    SourceError
        There is no manifest, or the source cannot be read.
    VerifyError
        Something differs.
    """
    manifest = read_manifest(root)
    _check_structure(root, manifest)
    digests = sources = 0
    lost: dict[str, int] = {}
    with Files(root) as files:
        if read_data:
            for event in check_digests(files, manifest):
                digests += not isinstance(event, Moved)
                if isinstance(event, Moved):
                    yield event
        if source is not None:
            for found in compare_with_source(files, manifest, kernels, source):
                if isinstance(found, Moved):
                    yield found
                elif found.nbytes:
                    lost[found.part] = lost.get(found.part, 0) + found.nbytes
            sources = len({digest.name for digest in manifest.sources}) + len(manifest.weights)
    count = len(manifest.tensors) + len(manifest.weights)
    yield Verified(len(manifest.files), count, digests, sources, lost)


def check_files(root: Path, manifest: Manifest) -> None:
    """Compare files and their sizes with the manifest.

    Raises
    ------
    VerifyError
        A file is missing, or of another size.
    """
    problems = []
    for entry in manifest.files:
        path = root / entry.path
        if not path.is_file():
            problems.append(f"`{entry.path}` is missing")
        elif path.stat().st_size != entry.size:
            size = path.stat().st_size
            problems.append(f"`{entry.path}` has {size} bytes, expected {entry.size}")
    fail(problems)


def _check_structure(root: Path, manifest: Manifest) -> None:
    """Compare files, sizes and headers with the manifest, without reading data."""
    check_files(root, manifest)
    problems = [
        f"`{entry.name}` has {len(entry.xxh3)} digests for experts {entry.first} to {entry.last}"
        for entry in manifest.tensors
        if len(entry.xxh3) != entry.last - entry.first + 1
    ]
    fail(problems)
    for file, entries in by_file(manifest).items():
        try:
            _, refs = read_header(root, file)
        except SourceError as error:
            raise VerifyError(str(error), hint=error.hint) from error
        found = {
            (r.name, r.spec.dtype, r.spec.shape, r.begin, r.begin + r.spec.nbytes) for r in refs
        }
        said = {(e.name, e.dtype, e.shape, e.begin, e.end) for e in entries}
        odd = sorted({name for name, *_ in found ^ said})
        problems += [f"`{name}` in `{file}` is not as `{MANIFEST_NAME}` says" for name in odd]
    known = {entry.path for entry in manifest.files}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        is_weight = path.name.removesuffix(".index.json").endswith(WEIGHT_SUFFIXES)
        if is_weight and name not in known and path.parts[len(root.parts)] != WORK_FOLDER:
            problems.append(f"`{name}` is not in `{MANIFEST_NAME}`")
    fail(problems)


def fail(problems: list[str]) -> None:
    """Raise the first of these problems, and say how many there are.

    Raises
    ------
    VerifyError
        There is one.
    """
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        hint = "copy the directory again, or convert again with `--overwrite`"
        raise VerifyError(problems[0] + more, hint=hint)


def by_file(manifest: Manifest) -> dict[str, list[TensorEntry | WeightEntry]]:
    """Return the tensors of each file, in file order."""
    table: dict[str, list[TensorEntry | WeightEntry]] = defaultdict(list)
    for entry in manifest.entries():
        table[entry.file].append(entry)
    for entries in table.values():
        entries.sort(key=lambda entry: (entry.begin, entry.end))
    return table


def check_digests(files: Files | RemoteModel, manifest: Manifest) -> Iterator[Moved | str]:
    """Compute every digest in one pass over each file; yield bytes, and each equal digest."""
    tensors = by_file(manifest)
    for held in manifest.files:
        sha256 = hashlib.sha256()
        entries = tensors.get(held.path, [])
        header_end = min((entry.begin for entry in entries), default=held.size)
        for chunk in _chunks(files, held.path, 0, header_end):
            sha256.update(chunk)
        for entry in entries:
            count = len(entry.xxh3) if isinstance(entry, TensorEntry) else 1
            expected = entry.xxh3 if isinstance(entry, TensorEntry) else (entry.xxh3,)
            size = (entry.end - entry.begin) // count
            for i in range(count):
                xxh3 = xxhash.xxh3_128()
                begin = entry.begin + i * size
                for chunk in _chunks(files, held.path, begin, begin + size):
                    sha256.update(chunk)
                    xxh3.update(chunk)
                    yield Moved(len(chunk))
                if xxh3.hexdigest() != expected[i]:
                    what = f"expert {entry.first + i} of " if isinstance(entry, TensorEntry) else ""
                    message = (
                        f"{what}`{entry.name}` in `{held.path}` is damaged: expected XXH3 "
                        f"{expected[i]}, found {xxh3.hexdigest()}"
                    )
                    raise VerifyError(message, hint="copy this file again, or convert again")
                yield expected[i]
        if sha256.hexdigest() != held.sha256:
            message = (
                f"`{held.path}` is damaged: expected SHA-256 {held.sha256}, "
                f"found {sha256.hexdigest()}"
            )
            raise VerifyError(message, hint="copy this file again, or convert again")
        yield held.sha256


def _chunks(files: Files | RemoteModel, name: str, begin: int, end: int) -> Iterator[memoryview]:
    buffer = np.empty(min(PIECE_BYTES, end - begin), np.uint8)
    for at in range(begin, end, max(buffer.nbytes, 1)):
        chunk = buffer[: min(buffer.nbytes, end - at)]
        files.read(name, at, chunk)
        yield memoryview(chunk)
