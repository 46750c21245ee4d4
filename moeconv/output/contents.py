"""What is in each file of a converted directory, and how does it begin? By its manifest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from moeconv.output.shard import arrange, shard_metadata
from moeconv.tensors import TensorSpec

if TYPE_CHECKING:
    from moeconv.output.manifest import Entry, Manifest
    from moeconv.output.shard import ShardLayout


def by_file(manifest: Manifest) -> dict[str, list[Entry]]:
    """Return the tensors of each file, in its order."""
    table: dict[str, list[Entry]] = defaultdict(list)
    for entry in manifest.entries():
        table[entry.file].append(entry)
    for entries in table.values():
        entries.sort(key=lambda entry: (entry.begin, entry.end))
    return table


def arranged(entries: Iterable[Entry], plan_id: str) -> ShardLayout:
    """Return the shard that the writer makes of these tensors, which are in its order."""
    specs = {entry.name: TensorSpec(entry.dtype, entry.shape) for entry in entries}
    return arrange(specs, shard_metadata(plan_id))
