"""Write one safetensors file, tensor piece by tensor piece, whole or not at all.

The library can only write tensors that are all in memory, so the header is written here: names in
file order, spaces up to a multiple of 4096, tensors whose size is a multiple of 256 first. Pieces
are written wherever their offset is, and `commit` makes the file durable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from moeconv.errors import OutputError
from moeconv.output.durable import GrowingFile, writing

if TYPE_CHECKING:
    from moeconv.tensors import Bytes, TensorSpec

DATA_ALIGNMENT: Final = 4096
TENSOR_ALIGNMENT: Final = 256
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a shard: absolute byte range `[begin, end)` of the file."""

    name: str
    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where everything in a shard goes."""

    header: bytes
    entries: tuple[Entry, ...]
    size: int


def arrange(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> ShardLayout:
    """Arrange tensors in a shard, in the order given but for small odd sizes, which come last."""
    sizes = [(name, spec, spec.nbytes) for name, spec in tensors.items()]
    order = sorted(sizes, key=lambda item: item[2] % TENSOR_ALIGNMENT != 0)
    table: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, spec, nbytes in order:
        offsets = [at, at + nbytes]
        table[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        at += nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % DATA_ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    entries = []
    begin = len(header)
    for name, spec, nbytes in order:
        entries.append(Entry(name, spec, begin, begin + nbytes))
        begin += nbytes
    return ShardLayout(header, tuple(entries), begin)


def shard_metadata(plan_id: str) -> Mapping[str, str]:
    """Return what a header says beside tensors: what readers expect, and whose shard it is."""
    return {"format": "pt", "moeconv plan": plan_id}


def is_of_plan(path: Path, plan_id: str) -> bool:
    """Say whether the header of a shard names a plan, as those of that plan begin.

    Raises
    ------
    OutputError
        The shard cannot be read.
    """
    begin = arrange({}, shard_metadata(plan_id)).header[_LENGTH_BYTES:].rstrip()[:-1]
    with writing(path), path.open("rb") as file:
        file.seek(_LENGTH_BYTES)
        return file.read(len(begin)) == begin


class ShardWriter:
    """One shard on its way to being durable.

    Parameters
    ----------
    temporary, final
        Where it grows and where it appears, as of a `GrowingFile`.
    layout
        What it will hold.

    Raises
    ------
    OutputError
        The disk is full or the file cannot be written.
    """

    def __init__(self, temporary: Path, final: Path, layout: ShardLayout) -> None:
        self._final, self._layout = final, layout
        self._sha256 = hashlib.sha256(layout.header)
        self._hashed = len(layout.header)
        self._file = GrowingFile(temporary, final, layout.size, layout.header)

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def write(self, at: int, data: Bytes) -> None:
        """Write bytes at an absolute offset; any order, any thread."""
        self._file.write(at, data)

    def digest(self, at: int, data: Bytes) -> None:
        """Take bytes into the file's digest; in file order, without a gap, each byte once."""
        if at != self._hashed:
            message = f"digest of `{self._final.name}` out of order: {at}, expected {self._hashed}"
            raise AssertionError(message)
        self._sha256.update(memoryview(data).cast("B"))
        self._hashed += data.nbytes

    def commit(self) -> str:
        """Make the shard durable under its final name and return its SHA-256."""
        if self._hashed != self._layout.size:
            message = (
                f"`{self._final.name}` is short: expected {self._layout.size} bytes, "
                f"found {self._hashed}"
            )
            raise OutputError(message)
        self._file.keep()
        return self._sha256.hexdigest()
