"""Fill one shard: read, lay out and write overlap, over a fixed set of reused buffers.

Each piece (one expert of one parameter, or a chunk of a tensor that passes through) borrows a slot.
Workers fill slots in any order; the calling thread takes them back in file order, digests them and
hands them out again. The slots are the whole memory bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeAlias

import xxhash

from moeconv.checkpoint.reader import Reader, scratch_bytes
from moeconv.errors import UnsupportedError
from moeconv.jobs import Converted, Job, Passthrough, Place
from moeconv.output.manifest import ShardRecord, SourceDigest, TensorRecord
from moeconv.output.shard import Entry, ShardWriter, arrange
from moeconv.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from moeconv.layouts.layout import Matrix
    from moeconv.layouts.verbs import Kernels
    from moeconv.tensors import Bytes

CHUNK_BYTES: Final = 1 << 24
"""Largest piece of a tensor that passes through."""

METADATA: Final[Mapping[str, str]] = {"format": "pt"}
"""What readers of safetensors expect in a header."""


@dataclass(frozen=True, slots=True)
class Moved:
    """So many source bytes were read, laid out and written."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of the machine to use: threads, and bytes of all buffers together."""

    workers: int
    max_host_bytes: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """What goes to `[at, at + size)` of the shard: an expert, or a chunk from `begin` on."""

    tensor: Converted | Passthrough
    at: int
    size: int
    expert: int = 0
    begin: int = 0


@dataclass(frozen=True, slots=True)
class _Slot:
    """Buffers of one piece: the source matrix, what is read on the way to it, and the result."""

    source: Bytes
    scratch: Bytes
    out: Bytes


@dataclass(frozen=True, slots=True)
class _Filled:
    """A piece that is written: its digest, and those of what was read for it."""

    xxh3: str
    sources: tuple[SourceDigest, ...]


_Pending: TypeAlias = "tuple[_Piece, _Slot, Future[_Filled]]"


class Pipeline:
    """Workers and buffers, for as many shards as are to be filled.

    Parameters
    ----------
    reader, kernels
        Where bytes come from, and what lays them out.
    plan
        All shards to come: the largest piece decides the size of a slot.
    limits
        Threads and memory.

    Raises
    ------
    UnsupportedError
        The memory limit does not hold one expert.
    """

    def __init__(self, reader: Reader, kernels: Kernels, plan: Plan, limits: Limits) -> None:
        sizes = slot_sizes(plan.jobs, limits)
        self._reader, self._kernels, self._plan = reader, kernels, plan
        self._chunk_bytes = sizes[2]
        count = min(limits.workers + 2, limits.max_host_bytes // sum(sizes))
        self._free = [_Slot(*(kernels.empty(size) for size in sizes)) for _ in range(count)]
        self._pool = ThreadPoolExecutor(limits.workers, thread_name_prefix="moeconv")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def fill(self, job: Job, temporary: Path, final: Path) -> Iterator[Moved | ShardRecord]:
        """Write one shard; yield bytes as they are done, then the record of the durable shard."""
        layout = arrange({tensor.name: tensor.spec for tensor in job.tensors}, METADATA)
        tensors = {tensor.name: tensor for tensor in job.tensors}
        pending: deque[_Pending] = deque()
        book = _Book()
        with ShardWriter(temporary, final, layout) as shard:
            try:
                for entry in layout.entries:
                    for piece in self._pieces(tensors[entry.name], entry):
                        if not self._free:
                            yield self._take_back(pending.popleft(), shard, book)
                        slot = self._free.pop()
                        future = self._pool.submit(self._work, piece, slot, shard)
                        pending.append((piece, slot, future))
                while pending:
                    yield self._take_back(pending.popleft(), shard, book)
            finally:
                self._abandon(pending)
            sha256 = shard.commit()
        records = tuple(
            TensorRecord(entry.name, entry.begin, entry.end, book.digests(entry.name))
            for entry in layout.entries
        )
        file = job.file
        yield ShardRecord(file, layout.size, sha256, "written", records, tuple(book.sources))

    def _pieces(self, tensor: Converted | Passthrough, entry: Entry) -> Iterator[_Piece]:
        if isinstance(tensor, Converted):
            size = tensor.output.spec.nbytes
            for i, expert in enumerate(tensor.experts):
                yield _Piece(tensor, entry.begin + i * size, size, expert=expert)
            return
        for begin in range(0, tensor.spec.nbytes, self._chunk_bytes):
            size = min(self._chunk_bytes, tensor.spec.nbytes - begin)
            yield _Piece(tensor, entry.begin + begin, size, begin=begin)

    def _work(self, piece: _Piece, slot: _Slot, shard: ShardWriter) -> _Filled:
        out = slot.out[: piece.size]
        sources: tuple[SourceDigest, ...] = ()
        if isinstance(piece.tensor, Converted):
            matrix = piece.tensor.output.matrix
            source = slot.source[: matrix.nbytes].reshape(matrix.shape)
            places = piece.tensor.places(piece.expert)
            sources = read_matrix(self._reader, places, source, slot.scratch)
            verb = self._plan.verb(piece.tensor, piece.expert)
            self._kernels.lay_out(verb, source, out)
            xxh3 = xxhash.xxh3_128_hexdigest(out)
        else:
            self._reader.read(piece.tensor.ref, piece.begin, out)
            xxh3 = ""
        shard.write(piece.at, out)
        return _Filled(xxh3, sources)

    def _take_back(self, pending: _Pending, shard: ShardWriter, book: _Book) -> Moved:
        piece, slot, future = pending
        try:
            filled = future.result()
            out = slot.out[: piece.size]
            shard.digest(piece.at, out)
            book.note(piece, filled, out)
        finally:
            self._free.append(slot)
        return Moved(piece.size)

    def _abandon(self, pending: deque[_Pending]) -> None:
        """Wait for what still runs, so that no worker writes to a closed shard."""
        for _, slot, future in pending:
            if not future.cancel():
                future.exception()
            self._free.append(slot)


class _Book:
    """Digests of one shard, as its pieces come in, in file order."""

    def __init__(self) -> None:
        self.sources: list[SourceDigest] = []
        self._experts: dict[str, list[str]] = {}
        self._whole: dict[str, xxhash.xxh3_128] = {}

    def note(self, piece: _Piece, filled: _Filled, out: Bytes) -> None:
        """Take in the digest of an expert, or the bytes of a chunk."""
        if isinstance(piece.tensor, Converted):
            self._experts.setdefault(piece.tensor.name, []).append(filled.xxh3)
            self.sources.extend(filled.sources)
        else:
            self._whole.setdefault(piece.tensor.name, xxhash.xxh3_128()).update(out)

    def digests(self, name: str) -> tuple[str, ...]:
        """Return one digest an expert, or that of the whole tensor."""
        if name in self._experts:
            return tuple(self._experts[name])
        return (self._whole.get(name, xxhash.xxh3_128()).hexdigest(),)


def read_matrix(
    reader: Reader, places: Sequence[Place], out: Bytes, scratch: Bytes
) -> tuple[SourceDigest, ...]:
    """Assemble the source matrix of one expert in `out`, zeros where it is padded.

    Returns the digests of what was read, a source tensor each.
    """
    filled = sum(
        place.part.shape[0] * place.part.shape[1] * place.part.item_bytes for place in places
    )
    if filled < out.nbytes:
        out.fill(0)
    sources = []
    for place in places:
        part = place.part
        rows, cols = part.shape
        window = out[place.row : place.row + rows, : cols * part.item_bytes]
        raw = reader.read_part(part, window, scratch)
        digest = xxhash.xxh3_128_hexdigest(raw)
        sources.append(SourceDigest(part.ref.name, *part.span, digest))
    return tuple(sources)


def scratch_for(places: Sequence[Place], matrix: Matrix) -> int:
    """Return the bytes that reading a source matrix needs beside it."""
    return max((scratch_bytes(place.part, matrix.row_bytes) for place in places), default=0)


def slot_sizes(jobs: Iterable[Job], limits: Limits) -> tuple[int, int, int]:
    """Return the bytes of a slot's three buffers: source matrix, scratch, result.

    Raises
    ------
    UnsupportedError
        The memory limit does not hold one slot.
    """
    source = scratch = out = chunk = 0
    for job in jobs:
        for tensor in job.tensors:
            if isinstance(tensor, Converted):
                matrix = tensor.output.matrix
                places = tensor.places(tensor.experts[0])
                source = max(source, matrix.nbytes)
                scratch = max(scratch, scratch_for(places, matrix))
                out = max(out, tensor.output.spec.nbytes)
            else:
                chunk = max(chunk, min(CHUNK_BYTES, tensor.spec.nbytes))
    needed = source + scratch + out
    if needed > limits.max_host_bytes:
        message = (
            f"`--max-host-memory` {limits.max_host_bytes} bytes does not hold one expert: "
            f"{needed} bytes are needed"
        )
        hint = f"`--max-host-memory {-(-needed // 1_000_000)}MB` would do"
        raise UnsupportedError(message, hint=hint)
    # A chunk needs only the result buffer, which may be as large as the limit allows one slot.
    out = max(out, min(chunk, limits.max_host_bytes - source - scratch), 1)
    return source, scratch, out
