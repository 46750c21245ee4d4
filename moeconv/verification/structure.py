"""Are all files there, of the right sizes, with the right headers, and no others that matter?

No weights are read. A header is what the writer gives to the tensors that the manifest names, to
the byte: a changed one is found without being parsed, and the first odd byte says where.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from moeconv.checkpoint.header import PREFIX_BYTES
from moeconv.checkpoint.sidefiles import WEIGHT_SUFFIXES
from moeconv.errors import VerifyError
from moeconv.output.contents import arranged, by_file
from moeconv.output.files import Files
from moeconv.output.names import MANIFEST_NAME, WORK_FOLDER
from moeconv.output.shard import ShardLayout
from moeconv.paths import sha256_of
from moeconv.tensors import BITS
from moeconv.verification.digests import check_sha256

if TYPE_CHECKING:
    from moeconv.output.manifest import Entry, FileEntry, Manifest

_READ_BY_ENGINES: Final = (
    *WEIGHT_SUFFIXES,
    *(f"{suffix}.index.json" for suffix in WEIGHT_SUFFIXES),
    *(".py", ".json", ".jinja", ".model", ".tiktoken", "vocab.txt", "merges.txt"),
)
"""What an engine may take for a part of the model: weights, code, configs, tokenizers."""


def check_structure(root: Path, manifest: Manifest) -> tuple[str, ...]:
    """Compare files, sizes, headers and small files with the manifest.

    Returns
    -------
    tuple[str, ...]
        Other files that are there, and that no engine reads.

    Raises
    ------
    VerifyError
        Something differs.
    """
    check_files(root, manifest)
    fail([*_odd_entries(manifest)])
    shards = by_file(manifest)
    _check_side_files(root, manifest, shards)
    with Files(root) as files:
        fail(
            [
                problem
                for file, entries in shards.items()
                for problem in _odd_header(files, file, entries, manifest.plan_id)
            ]
        )
    found = strays(_names(root), manifest)
    fail(found.problems)
    return found.others


def check_files(root: Path, manifest: Manifest) -> None:
    """Compare files and their sizes with the manifest.

    Raises
    ------
    VerifyError
        A file is missing, or of another size.
    """
    fail([problem for entry in manifest.files if (problem := _odd_file(root, entry))])


def _odd_file(root: Path, entry: FileEntry) -> str | None:
    path = root / entry.path
    try:
        if not path.is_file():
            return f"`{entry.path}` is missing"
        size = path.stat().st_size
    except OSError as error:  # a name that no disk takes, or a disk that fails
        return f"`{entry.path}` cannot be looked at: {error.strerror}"
    return None if size == entry.size else f"`{entry.path}` has {size} bytes, expected {entry.size}"


@dataclass(frozen=True, slots=True)
class Strays:
    """Files that a manifest does not name: those that an engine may read, and others."""

    problems: list[str]
    others: tuple[str, ...]


def strays(names: Iterable[str], manifest: Manifest) -> Strays:
    """Return what there is beside the files of a conversion, by relative names.

    Hidden files are nobody's business but for weights; a card belongs to where it is published.
    """
    known = {MANIFEST_NAME, "README.md", *(entry.path for entry in manifest.files)}
    problems, others = [], []
    for name in sorted(set(names) - known):
        parts = name.split("/")
        is_hidden = any(part.startswith(".") for part in parts)
        if parts[0] == WORK_FOLDER or (is_hidden and not name.endswith(WEIGHT_SUFFIXES)):
            continue
        if name.endswith(_READ_BY_ENGINES):
            problems.append(f"`{name}` is not in `{MANIFEST_NAME}`")
        else:
            others.append(name)
    return Strays(problems, tuple(others))


def fail(problems: Sequence[str]) -> None:
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


def _names(root: Path) -> Iterator[str]:
    for path in root.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(root).as_posix()


def _odd_entries(manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with a manifest's tensors, whatever the files hold."""
    for tensor in manifest.tensors:
        if len(tensor.xxh3) != tensor.last - tensor.first + 1:
            yield (
                f"`{tensor.name}` has {len(tensor.xxh3)} digests for experts {tensor.first} to "
                f"{tensor.last}"
            )
    for entry in manifest.entries():
        if entry.dtype not in BITS or min(entry.shape, default=0) < 0:
            yield f"`{entry.name}` cannot be {entry.dtype} {[*entry.shape]}"


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


def _odd_header(files: Files, file: str, entries: Sequence[Entry], plan_id: str) -> Iterator[str]:
    """Yield what is wrong with a shard's header, or with where the manifest has its tensors."""
    layout = arranged(entries, plan_id)
    expected = np.frombuffer(layout.header, np.uint8)
    found = np.empty_like(expected)
    files.read(file, 0, found)
    if not np.array_equal(found, expected):
        yield _where(file, layout, int(np.flatnonzero(found != expected)[0]))
    said = {(entry.name, entry.begin, entry.end) for entry in entries}
    meant = {(entry.name, entry.begin, entry.end) for entry in layout.entries}
    if said != meant or len(entries) != len(layout.entries):
        name = min((name for name, *_ in said ^ meant), default=entries[0].name)
        yield f"`{name}` in `{file}` is not where `{MANIFEST_NAME}` says"


def _where(file: str, layout: ShardLayout, at: int) -> str:
    """Say whose part of a header has its first odd byte."""
    changed = f"`{file}` has a changed header, or is of another conversion: byte {at}, in its "
    if at < PREFIX_BYTES:
        return changed + "length"
    if at >= len(layout.header.rstrip(b" ")):
        return changed + "padding"
    begin, name = 0, None
    for entry in layout.entries:
        key = json.dumps(entry.name, ensure_ascii=False).encode()
        begin = layout.header.index(key + b":{", begin)
        if begin > at:
            break
        name = entry.name
    if name is None:
        return changed + "metadata"
    return f"`{name}` in `{file}` is not as `{MANIFEST_NAME}` says: header, byte {at}"
