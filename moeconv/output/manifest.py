"""What does a converted directory say of itself? `moeconv.json`: manifest and index in one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

FORMAT: Final = 1


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
        Where that is from: `hub metadata`, `cache blob name`, or `read` with `--hash-source`; the
        first two end in ` and read` where reading the file confirmed them.
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
    unsound
        Global scales that are NaN, infinite, zero or negative; they become what the engine makes
        of them.
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
    unsound: int = 0


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
    run_digest
        SHA-256 of `run`, likewise.
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
    run_digest: str = ""

    def entries(self) -> Iterator[Entry]:
        """Return every tensor of the directory."""
        yield from self.tensors
        yield from self.weights
        if self.restore:
            yield from self.restore.kept
