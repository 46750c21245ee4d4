"""Is it still true? Structure, then digests, then the inverse and others against the source."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moeconv.checkpoint.header import PREFIX_BYTES, read_header
from moeconv.checkpoint.sidefiles import WEIGHT_SUFFIXES
from moeconv.conversion.pipeline import Moved
from moeconv.errors import SourceError, VerifyError
from moeconv.output.codec import check_unchanged, read_manifest
from moeconv.output.contents import arranged, by_file
from moeconv.output.files import Files
from moeconv.output.manifest import Entry, Manifest
from moeconv.output.names import MANIFEST_NAME, WORK_FOLDER
from moeconv.paths import sha256_of
from moeconv.restoration.inverse import Lost, compare_with_source
from moeconv.restoration.witness import Witnessed
from moeconv.verification.digests import Subset, check_digests, check_sha256

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Kernels


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
    """

    files: int
    tensors: int
    digests: int = 0
    sources: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    witnessed: dict[str, int] = field(default_factory=dict)
    unwitnessed: int = 0


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
        Compare the inverse of every tensor with this checkpoint, byte for byte, and a sample of
        the experts with what FlashInfer or plain torch make of it.

    Raises
    ------
    SourceError
        There is no manifest, or the source cannot be read.
    VerifyError
        Something differs.
    """
    manifest = read_manifest(root)
    check_unchanged((root / MANIFEST_NAME).read_bytes())
    _check_structure(root, manifest)
    digests = sources = 0
    lost, witnessed = Counter[str](), Counter[str | None]()
    with Files(root) as files:
        if read_data:
            for event in check_digests(files, manifest, read_data):
                digests += not isinstance(event, Moved)
                if isinstance(event, Moved):
                    yield event
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
    yield Verified(len(manifest.files), count, digests, sources, kept, named, witnessed[None])


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
    shards = by_file(manifest)
    _check_side_files(root, manifest, shards)
    for file, entries in shards.items():
        try:
            header, refs = read_header(root, file)
        except SourceError as error:
            raise VerifyError(str(error), hint=error.hint) from error
        found = {
            (r.name, r.spec.dtype, r.spec.shape, r.begin, r.begin + r.spec.nbytes) for r in refs
        }
        said = {(e.name, e.dtype, e.shape, e.begin, e.end) for e in entries}
        odd = sorted({name for name, *_ in found ^ said})
        problems += [f"`{name}` in `{file}` is not as `{MANIFEST_NAME}` says" for name in odd]
        if not odd and header.header_sha256 != _header_sha256(entries, manifest.plan_id):
            problems.append(f"`{file}` has a changed header, or is of another conversion")
    known = {entry.path for entry in manifest.files}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        is_weight = path.name.removesuffix(".index.json").endswith(WEIGHT_SUFFIXES)
        if is_weight and name not in known and path.parts[len(root.parts)] != WORK_FOLDER:
            problems.append(f"`{name}` is not in `{MANIFEST_NAME}`")
    fail(problems)


def _check_side_files(root: Path, manifest: Manifest, shards: Container[str]) -> None:
    """Compare the digests of small files: what a changed config or tokenizer does is not small."""
    for entry in manifest.files:
        if entry.path not in shards:
            try:
                found = sha256_of(root / entry.path)
            except OSError as error:
                message = f"`{entry.path}` cannot be read: {error.strerror}"
                raise VerifyError(message) from error
            check_sha256(entry, found)


def _header_sha256(entries: Iterable[Entry], plan_id: str) -> str:
    """Return the digest of the header that the writer gives to a shard of these tensors."""
    return hashlib.sha256(arranged(entries, plan_id).header[PREFIX_BYTES:]).hexdigest()


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
