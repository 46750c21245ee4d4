"""Fill one shard: read, lay out and write overlap, over a fixed ring of reused buffers.

Each piece (experts of one parameter, or what passes through side by side) borrows a slot.
Workers fill slots in any order; whoever fills the shard takes them back in file order, digests
them and gives them back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

import xxhash

from moeconv.checkpoint.reader import Reader, Rows
from moeconv.conversion.budget import Limits, budget_for
from moeconv.conversion.pieces import Experts, Piece, pieces_of
from moeconv.conversion.reading import read_matrices, spans_of
from moeconv.conversion.ring import Ring, Slot
from moeconv.output.manifest import SourceDigest
from moeconv.output.records import WRITTEN, ShardRecord, TensorRecord
from moeconv.output.shard import ShardWriter
from moeconv.planning.plan import Plan
from moeconv.ranges.digests import xxh3_each

if TYPE_CHECKING:
    from pathlib import Path

    from moeconv.layouts.verbs import Kernels
    from moeconv.planning.jobs import Job
    from moeconv.tensors import Bytes


@dataclass(frozen=True, slots=True)
class Moved:
    """So many source bytes were read, laid out and written."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class _Filled:
    """A piece that is written: a digest an expert, and those of what was read for them."""

    xxh3: tuple[str, ...] = ()
    sources: tuple[SourceDigest, ...] = ()


_Pending: TypeAlias = "tuple[Piece, Slot, Future[_Filled]]"


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
        A memory limit does not hold one expert, or the machine has not so much.
    """

    def __init__(self, reader: Reader, kernels: Kernels, plan: Plan, limits: Limits) -> None:
        budget = budget_for(plan.jobs, limits, kernels)
        self._reader, self._plan, self._sizes = reader, plan, budget.sizes
        self._ring = Ring(kernels, budget)
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
        self._ring.close()

    @property
    def peak_device_bytes(self) -> int:
        """Most device memory that was taken so far; 0 on the host."""
        return self._ring.peak_device_bytes

    def fill(self, job: Job, temporary: Path, final: Path) -> Iterator[Moved | ShardRecord]:
        """Write one shard; yield bytes as they are done, then the record of the durable shard.

        Several shards may be filled at once, each by a thread of its own.
        """
        layout = job.arranged(self._plan.id)
        tensors = {tensor.name: tensor for tensor in job.tensors}
        pending: deque[_Pending] = deque()
        book = _Book()
        spans = spans_of((tensors[entry.name] for entry in layout.entries), self._sizes.out)
        with (
            ShardWriter(temporary, final, layout) as shard,
            self._ring.sharing(),
            self._reader.ahead(spans),
        ):
            try:
                for piece in pieces_of(job, layout.entries, self._plan, self._sizes):
                    while (slot := self._ring.take_another(len(pending))) is None:
                        yield self._take_back(pending.popleft(), shard, book)
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
        yield ShardRecord(file, layout.size, sha256, WRITTEN, records, tuple(book.sources))

    def _work(self, piece: Piece, slot: Slot, shard: ShardWriter) -> _Filled:
        out = slot.out[: piece.size]
        if isinstance(piece, Experts):
            filled = self._laid_out(piece, slot)
        else:
            parts = piece.parts(out)
            self._reader.read_rows(
                [Rows((strip.tensor.ref,), (strip.begin,), part[None]) for strip, part in parts]
            )
            filled = _Filled()
        shard.write(piece.at, out)
        return filled

    def _laid_out(self, piece: Experts, slot: Slot) -> _Filled:
        """Read the experts of a piece into a slot and lay them out there."""
        sources, outs = piece.sides(slot)
        lots = piece.tensor.lots(piece.experts)
        digests = read_matrices(self._reader, lots, sources, slot.scratch)
        self._ring.lay_out(piece.verb, sources, outs)
        return _Filled(tuple(xxh3_each([outs])), digests)

    def _take_back(self, pending: _Pending, shard: ShardWriter, book: _Book) -> Moved:
        piece, slot, future = pending
        try:
            filled = future.result()
            out = slot.out[: piece.size]
            shard.digest(piece.at, out)
            book.note(piece, filled, out)
        finally:
            self._ring.give_back(slot)
        return Moved(piece.size)

    def _abandon(self, pending: deque[_Pending]) -> None:
        """Wait for what still runs, so that no worker writes to a closed shard."""
        for _, slot, future in pending:
            if not future.cancel():
                future.exception()
            self._ring.give_back(slot)


class _Book:
    """Digests of one shard, as its pieces come in, in file order."""

    def __init__(self) -> None:
        self.sources: list[SourceDigest] = []
        self._experts: dict[str, list[str]] = {}
        self._whole: dict[str, xxhash.xxh3_128] = {}

    def note(self, piece: Piece, filled: _Filled, out: Bytes) -> None:
        """Take in the digests of experts, or the bytes of strips."""
        if isinstance(piece, Experts):
            self._experts.setdefault(piece.tensor.name, []).extend(filled.xxh3)
            self.sources.extend(filled.sources)
            return
        for strip, part in piece.parts(out):
            self._whole.setdefault(strip.tensor.name, xxhash.xxh3_128()).update(part)

    def digests(self, name: str) -> tuple[str, ...]:
        """Return one digest an expert, or that of the whole tensor."""
        if name in self._experts:
            return tuple(self._experts[name])
        return (self._whole.get(name, xxhash.xxh3_128()).hexdigest(),)
