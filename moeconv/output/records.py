"""What does `.moeconv/` note of work that is done?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeconv.output.manifest import FactsEntry, SourceDigest


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
class Asked:
    """The branch or tag of a repository that a run was asked for, and the commit it was at."""

    repo: str
    revision: str
    commit: str


@dataclass(frozen=True, slots=True)
class KeptFacts:
    """What a survey found for a plan: kept in `.moeconv/`, so that resuming does not repeat it."""

    plan_id: str
    facts: tuple[FactsEntry, ...]
