"""What a converted directory says of itself: `moeconv.json`, manifest and index in one.

Decoding is strict about what is there and lenient about what a later version adds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import msgspec

from moeconv.errors import SourceError, VerifyError
from moeconv.paths import is_below, read_regular

MANIFEST_NAME: Final = "moeconv.json"
WORK_FOLDER: Final = ".moeconv"
FORMAT: Final = 1
_MOST_BYTES: Final = 1 << 29
_UNDIGESTED: Final = ("run", "digest")

SOURCE_CARD: Final = "README.source.md"
"""Where the source's `README.md` is kept: a repository shows that name as the card of the copy."""


def kept_name(name: str) -> str:
    """Return where a converted directory keeps a side file of the source."""
    return SOURCE_CARD if name == "README.md" else name


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine that takes the layout: its versions and what selects the kernel there."""

    name: str
    versions: str
    backend: str


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """Which bytes the experts are in.

    Attributes
    ----------
    order
        `stored` (any TP reads ranges) or `engine` (made for `tp`).
    tp
        The TP size it is made for; `None` for any.
    fingerprint
        SHA-256 of a fixed probe, by kind and parameter.
    """

    id: str
    version: int
    order: str
    tp: int | None
    engines: tuple[EngineEntry, ...]
    fingerprint: dict[str, str]


@dataclass(frozen=True, slots=True)
class SourceFileEntry:
    """A weight file of the source.

    Attributes
    ----------
    probe_xxh3
        Of a few places of its data; `None` where it came from the Hub, by byte ranges.
    sha256
        Of the whole file; `None` where it is not known.
    sha256_from
        Where that is from: `hub metadata`, `cache blob name`, or `read` with `--hash-source`.
    """

    name: str
    size: int
    header_sha256: str
    probe_xxh3: str | None
    sha256: str | None = None
    sha256_from: str | None = None


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """Where the bytes came from: a repository of the Hub and its commit, or a directory's name."""

    name: str
    revision: str | None
    model_types: tuple[str, ...]
    family: str
    files: tuple[SourceFileEntry, ...]


@dataclass(frozen=True, slots=True)
class StackEntry:
    """One layer's experts: prefix in the checkpoint, sizes, scheme, and the TP sizes served."""

    prefix: str
    layer: int
    experts: int
    hidden: int
    intermediate: int
    gated: bool
    order: str
    scheme: str
    tp_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FactsEntry:
    """What the layout did to one layer's scales, for a rank where the file is made for one TP.

    Attributes
    ----------
    factors
        The power of two taken out of the block scales of w13 and of w2.
    scales, flushed, negative
        Block scales in all, those that became zero, and those below zero or NaN.
    differing
        Experts whose gate and up have different global scales.
    ratios
        What gate's and up's block scales were multiplied by, an expert each, where they were.
    lossy
        Projections and experts whose block scales do not all come back.
    """

    prefix: str
    rank: int | None
    factors: tuple[float, float]
    scales: int
    flushed: int
    negative: int
    differing: int
    ratios: tuple[tuple[float, float], ...] = ()
    lossy: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A converted tensor: experts `first` to `last` of one engine parameter.

    `begin` and `end` are byte offsets in `file`; `xxh3` has one digest an expert, in order.
    """

    name: str
    prefix: str
    param: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    first: int
    last: int
    rank: int | None
    xxh3: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A tensor that passed through, byte for byte under its own name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class KeptEntry:
    """Bytes of a source file that the layout cannot give back, under a name of their own.

    Attributes
    ----------
    source, source_begin
        The file of the source, and where in it they start.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    xxh3: str
    source: str
    source_begin: int


Entry: TypeAlias = "TensorEntry | WeightEntry | KeptEntry"
"""A tensor of the directory."""


@dataclass(frozen=True, slots=True)
class SidecarEntry:
    """What restoring the source needs beside experts and weights; no engine reads it.

    Attributes
    ----------
    nbytes
        Bytes that are kept.
    kept
        Headers and indexes, tensors that the layout has no use for, and those it loses bits of.
    """

    nbytes: int
    kept: tuple[KeptEntry, ...]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the directory."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SourceDigest:
    """XXH3-128 of the bytes `[begin, end)` of a source tensor, as they passed."""

    name: str
    begin: int
    end: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class RunEntry:
    """How the last run went; the only part that differs between two equal conversions."""

    device: str
    kernels: str
    workers: int
    seconds: float
    bytes_read: int
    bytes_written: int
    peak_rss_bytes: int
    peak_device_bytes: int
    jobs_resumed: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole of `moeconv.json`.

    Attributes
    ----------
    plan_id, plan
        Digest of all that decides the bytes, and what it is a digest of.
    partial
        Which part of the model is here, as `layers 0-1`; `None` when it is all of it.
    dtype
        The serving dtype that the bytes were made for.
    facts
        What the layout did to scales, a layer each.
    left_out
        How many source tensors of each part the kernel has no use for: they are in no file that
        an engine reads.
    restore
        What the source is restored from, beside the tensors; `None` where it was not wanted.
    tensors, weights
        Converted tensors, and those that passed through.
    files
        Every other file of the directory.
    sources
        Digests of the source tensors.
    digest
        SHA-256 of all this but `run`, as JSON without spaces, its names sorted.
    """

    format: int
    plan_id: str
    plan: dict[str, str]
    partial: str | None
    dtype: str
    layout: LayoutEntry
    source: SourceEntry
    tools: dict[str, str]
    stacks: tuple[StackEntry, ...]
    facts: tuple[FactsEntry, ...]
    left_out: dict[str, int]
    restore: SidecarEntry | None
    tensors: tuple[TensorEntry, ...]
    weights: tuple[WeightEntry, ...]
    files: tuple[FileEntry, ...]
    sources: tuple[SourceDigest, ...]
    run: RunEntry
    digest: str = ""

    def entries(self) -> Iterator[Entry]:
        """Return every tensor of the directory."""
        yield from self.tensors
        yield from self.weights
        if self.restore:
            yield from self.restore.kept


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor of a finished shard: one digest an expert, or one for a passthrough tensor."""

    name: str
    begin: int
    end: int
    xxh3: tuple[str, ...]


WRITTEN: Final = "written"
"""State of a shard that is durable in the directory."""

UPLOADED: Final = "uploaded"
"""State of a shard that is durable on the Hub; it may be gone from the directory."""


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A finished shard: what `.moeconv/` keeps of a job that is done."""

    file: str
    size: int
    sha256: str
    state: str
    tensors: tuple[TensorRecord, ...]
    sources: tuple[SourceDigest, ...]


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """The record of a shard, and whose: another plan has shards of the same names and sizes."""

    plan_id: str
    record: ShardRecord


@dataclass(frozen=True, slots=True)
class KeptFacts:
    """What a survey found for a plan: kept in `.moeconv/`, so that resuming does not repeat it."""

    plan_id: str
    facts: tuple[FactsEntry, ...]


_T = TypeVar("_T")


def encode(value: object) -> bytes:
    """Return a value as JSON, the same bytes for the same value."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def decode(data: bytes, kind: type[_T], what: str) -> _T:
    """Return a value of `kind` from JSON.

    Raises
    ------
    VerifyError
        The JSON is broken, or a field is missing or of another type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        message = f"`{what}` cannot be read: {error}"
        raise VerifyError(message) from error


def read_note(path: Path, kind: type[_T]) -> _T | None:
    """Return what a process of an unfinished run noted; a broken note is none."""
    try:
        return decode(read_regular(path, _MOST_BYTES), kind, path.name)
    except (OSError, VerifyError):
        return None


def encode_sealed(manifest: Manifest) -> bytes:
    """Return a manifest as JSON, with its own digest."""
    return encode(replace(manifest, digest=_own_digest(encode(manifest))))


def check_unchanged(data: bytes) -> None:
    """Compare a manifest, as JSON, with its own digest: against a slip, not against malice.

    Raises
    ------
    VerifyError
        It is not as it was written.
    """
    if decode(data, Manifest, MANIFEST_NAME).digest != _own_digest(data):
        message = f"`{MANIFEST_NAME}` was changed after the conversion: its own digest differs"
        raise VerifyError(message, hint="copy it again, or convert again with `--overwrite`")


def _own_digest(data: bytes) -> str:
    """Digest what is there, fields of a later version too."""
    table = decode(data, dict[str, msgspec.Raw], MANIFEST_NAME)
    rest = {name: msgspec.json.decode(table[name]) for name in table if name not in _UNDIGESTED}
    return hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()


def read_manifest(root: Path) -> Manifest:
    """Read the manifest of a converted directory.

    Raises
    ------
    SourceError
        There is none: the directory is not converted, or not finished.
    VerifyError
        It is broken or of a later format.
    """
    try:
        data = read_regular(root / MANIFEST_NAME, _MOST_BYTES)
    except FileNotFoundError:
        hint = "is this a converted directory?"
        if (root / ".moeconv").is_dir():
            hint = "the conversion is not finished; run the same `moeconv` command again"
        elif not root.exists():
            hint = "give a directory; `hf download` fetches one that is on the Hub"
        message = f"`{MANIFEST_NAME}` is not in `{root}`"
        raise SourceError(message, hint=hint) from None
    except OSError as error:
        message = f"`{root / MANIFEST_NAME}` cannot be read: {error.strerror}"
        raise SourceError(message) from error
    manifest = decode(data, Manifest, MANIFEST_NAME)
    if manifest.format != FORMAT:
        message = f"`{MANIFEST_NAME}` has format {manifest.format}, expected {FORMAT}"
        raise VerifyError(message, hint="it was written by another version of moeconv")
    _check_names(manifest)
    return manifest


def _check_names(manifest: Manifest) -> None:
    """Refuse names that lead out of the directory, whoever wrote them."""
    names = {entry.path for entry in manifest.files}
    names |= {entry.file for entry in manifest.entries()}
    odd = sorted(name for name in names if not is_below(name))
    if odd:
        message = f"`{MANIFEST_NAME}` names the file {odd[0]!r}, outside the directory"
        raise VerifyError(message, hint="do not use this directory: moeconv writes no such name")
