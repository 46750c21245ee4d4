"""How much of the machine may a conversion take, and what is that spent on?

All memory of a conversion is a fixed set of slots, and on a GPU a few stations beside them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from moeconv.conversion.reading import scratch_for
from moeconv.counts import MOST_WORKERS, check_count
from moeconv.errors import UnsupportedError
from moeconv.layouts.verbs import DeviceKernels
from moeconv.planning.jobs import Converted, Job
from moeconv.share import WHOLE, Share, ranks_here
from moeconv.tensors import round_up

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.layouts.verbs import Kernels

PIECE_BYTES: Final = 1 << 22
"""Largest piece that is not one expert: several small ones, or part of what passes through."""

_WORKER_PIECE_BYTES: Final = 1 << 20
"""The same for each worker, where that is more: all wait for one interpreter, once a piece.

For more than `_MOST_WORKERS` no piece grows: memory goes by how many there are, too.
"""

_DEVICE_PIECE_BYTES: Final = 1 << 24
"""The same where a device lays out: each launch and each copy has its price."""

_MOST_WORKERS: Final = 16

_STATIONS: Final = 3
"""One batch goes up, one is laid out and one comes back; a device does no more at a time."""


def default_workers() -> int:
    """Return half of the cores that this process may use: the other half digests files.

    Under `torchrun` the processes of a machine divide them.
    """
    return min(_MOST_WORKERS, max(2, len(os.sched_getaffinity(0)) // 2 // ranks_here()))


@dataclass(frozen=True, slots=True)
class Limits:
    """How much to take on: threads, bytes of all buffers, which jobs, and how many at once.

    Raises
    ------
    UnsupportedError
        One of them is no whole number, or none that makes sense.
    """

    workers: int
    max_host_bytes: int = 1 << 30
    max_device_bytes: int = 1 << 30
    share: Share = WHOLE
    max_shards: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_count("workers", self.workers, least=1, most=MOST_WORKERS)
        check_count("max_host_bytes", self.max_host_bytes, least=0)
        check_count("max_device_bytes", self.max_device_bytes, least=0)
        if self.max_shards is not None:
            check_count("max_shards", self.max_shards, least=1)

    def ahead_bytes(self, checkpoint: Checkpoint) -> int:
        """Return how much of host memory is for what is fetched ahead: a quarter, from afar."""
        return self.max_host_bytes // 4 if checkpoint.origin.is_remote else 0

    def beside(self, nbytes: int) -> Limits:
        """Return what is left when so much host memory is taken."""
        return replace(self, max_host_bytes=self.max_host_bytes - nbytes)

    @property
    def shards(self) -> int:
        """How many shards to fill at once.

        A file's SHA-256 takes one thread, in file order; it keeps up with about one worker.
        """
        enough = max(1, self.workers - 1)
        return enough if self.max_shards is None else min(enough, self.max_shards)

    @property
    def slots(self) -> int:
        """How many pieces to have in flight, where memory is not short.

        One that each worker fills, and of each shard one that is digested and one that waits.
        """
        return self.workers + 2 * self.shards


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a slot's three buffers: source matrices, scratch, results; whole pages."""

    source: int
    scratch: int
    out: int

    @property
    def total(self) -> int:
        """All three."""
        return self.source + self.scratch + self.out


@dataclass(frozen=True, slots=True)
class Budget:
    """What a conversion allocates, once.

    Attributes
    ----------
    sizes
        Of each slot.
    slots
        Pieces that may be in flight.
    stations
        Batches that may be on the device; 0 where the host lays out.
    station_bytes
        Device memory that one of them takes.
    """

    sizes: Sizes
    slots: int
    stations: int = 0
    station_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """All slots."""
        return self.slots * self.sizes.total

    @property
    def device_bytes(self) -> int:
        """All stations."""
        return self.stations * self.station_bytes


def expert_sizes(jobs: Iterable[Job]) -> Sizes:
    """Return the buffers that hold the largest expert of every parameter."""
    return _sizes(tuple(jobs), 0)


def budget_for(jobs: Iterable[Job], limits: Limits, kernels: Kernels) -> Budget:
    """Spend the limits: as many slots as workers keep busy, then pieces as large as still fit.

    Raises
    ------
    UnsupportedError
        A limit does not hold one expert.
    """
    jobs = tuple(jobs)
    piece = max(PIECE_BYTES, min(limits.workers, _MOST_WORKERS) * _WORKER_PIECE_BYTES)
    if isinstance(kernels, DeviceKernels):
        piece = _DEVICE_PIECE_BYTES
    sizes = _sizes(jobs, piece)
    while piece and (
        limits.slots * sizes.total > limits.max_host_bytes
        or _station_bytes(kernels, sizes) > limits.max_device_bytes
    ):
        piece = piece // 2 if piece > mmap.PAGESIZE else 0
        sizes = _sizes(jobs, piece)
    _check("host", limits.max_host_bytes, sizes.total)
    slots = min(limits.slots, limits.max_host_bytes // sizes.total)
    if not isinstance(kernels, DeviceKernels):
        return Budget(sizes, slots)
    station = _station_bytes(kernels, sizes)
    _check("device", limits.max_device_bytes, station)
    stations = min(_STATIONS, slots, limits.max_device_bytes // max(station, 1))
    return Budget(sizes, slots, stations, station)


def _sizes(jobs: tuple[Job, ...], piece: int) -> Sizes:
    """Return buffers for pieces of `piece` bytes, or of one expert where that is larger."""
    source = scratch = out = 0
    for tensor in (tensor for job in jobs for tensor in job.tensors):
        if not isinstance(tensor, Converted):
            out = max(out, min(piece, tensor.spec.nbytes))
            continue
        matrix, expert = tensor.output.matrix, tensor.output.spec.nbytes
        several = max(1, min(len(tensor.experts), piece // max(matrix.nbytes, expert, 1)))
        source = max(source, several * matrix.nbytes)
        scratch = max(scratch, scratch_for(tensor.places(tensor.experts[0]), matrix))
        out = max(out, several * expert)
    # What passes through fits any buffer, in pieces; there must be one.
    return Sizes(*(round_up(size, mmap.PAGESIZE) for size in (source, scratch, max(out, 1))))


def _station_bytes(kernels: Kernels, sizes: Sizes) -> int:
    if isinstance(kernels, DeviceKernels):
        return kernels.batch_bytes(sizes.source, sizes.out)
    return 0


def _check(where: str, limit: int, needed: int) -> None:
    if needed > limit:
        message = (
            f"`--max-{where}-memory` {limit} bytes does not hold one expert: "
            f"{needed} bytes are needed"
        )
        hint = f"`--max-{where}-memory {-(-needed // 1_000_000)}MB` would do"
        raise UnsupportedError(message, hint=hint)
