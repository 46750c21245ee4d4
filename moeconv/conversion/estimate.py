"""How long will it take, and how much memory? From a few experts, laid out a few times."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeconv.conversion.budget import Limits, budget_for
from moeconv.conversion.pieces import experts_of
from moeconv.conversion.reading import read_matrices
from moeconv.conversion.ring import Ring, Slot
from moeconv.planning.jobs import Converted
from moeconv.ranges.digests import xxh3_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moeconv.checkpoint.reader import Reader
    from moeconv.conversion.pieces import Experts
    from moeconv.layouts.verbs import Kernels
    from moeconv.planning.jobs import Job
    from moeconv.planning.plan import Plan

_ROUNDS: Final = 3
_WRITTEN_BYTES: Final = 1 << 26
_WRITES: Final = 16


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a conversion will take, from a measurement of what goes through a slot at once.

    Attributes
    ----------
    seconds
        Reading, laying out, digesting and writing all of it.
    bytes_per_s
        Of output, at that rate.
    sample_bytes
        Size of the experts that were laid out.
    buffer_bytes
        All buffers of the pipeline.
    host_bytes
        Peak memory of the process: what it holds now, and the buffers.
    device_bytes
        All buffers on a GPU; 0 on a CPU.
    """

    seconds: float
    bytes_per_s: float
    sample_bytes: int
    buffer_bytes: int
    host_bytes: int
    device_bytes: int


def estimate(
    plan: Plan, reader: Reader, kernels: Kernels, limits: Limits, folder: Path
) -> Estimate:
    """Read what a slot holds of each parameter, lay it out a few times, and scale that up.

    What the disk takes is measured with a file in `folder` that never gets a name.
    """
    job = next(job for job in plan.jobs if isinstance(job.tensors[0], Converted))
    budget = budget_for(plan.jobs, limits, kernels)
    pieces = [
        next(experts_of(tensor, 0, plan, budget.sizes))
        for tensor in job.tensors
        if isinstance(tensor, Converted)
    ]
    with closing(Ring(kernels, replace(budget, slots=1, stations=min(1, budget.stations)))) as ring:
        slot = ring.take()
        rounds = [_seconds(pieces, reader, ring, slot) for _ in range(_ROUNDS)]
    nbytes = sum(piece.size for piece in pieces)
    cpus = len(os.sched_getaffinity(0))
    expert_bytes = sum(_expert_bytes(job) for job in plan.jobs)
    parallel = min(rounds)[0] / nbytes * expert_bytes / min(limits.workers, cpus)
    serial = min(digest for _, digest in rounds) / nbytes * plan.nbytes
    written = _seconds_a_byte(folder) * plan.nbytes
    seconds = max(parallel, serial, written) if cpus > 1 else parallel + serial + written
    return Estimate(
        seconds=round(seconds, 3),
        bytes_per_s=plan.nbytes / max(seconds, 1e-9),
        sample_bytes=nbytes,
        buffer_bytes=budget.host_bytes,
        host_bytes=peak_rss_bytes() + budget.host_bytes,
        device_bytes=budget.device_bytes,
    )


def peak_rss_bytes() -> int:
    """Return this process's own peak; `getrusage` would tell that of the process it came from."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(kilobytes) * 1024


def _seconds(
    pieces: Sequence[Experts], reader: Reader, ring: Ring, slot: Slot
) -> tuple[float, float]:
    """Return the time of a worker, and of the thread that digests the file, for some experts."""
    work = digest = 0.0
    for piece in pieces:
        sources, outs = piece.sides(slot)
        lots = piece.tensor.lots(piece.experts)
        started = time.perf_counter()
        read_matrices(reader, lots, sources, slot.scratch)
        ring.lay_out(piece.verb, sources, outs)
        xxh3_each([outs])
        laid_out = time.perf_counter()
        hashlib.sha256(outs).hexdigest()
        work += laid_out - started
        digest += time.perf_counter() - laid_out
    return work, digest


def _seconds_a_byte(folder: Path) -> float:
    """Return what the disk takes to keep a byte; 0 where it cannot be tried."""
    data = bytes(_WRITTEN_BYTES // _WRITES)
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return 0.0
    try:
        started = time.perf_counter()
        for _ in range(_WRITES):
            os.write(fd, data)
        os.fsync(fd)
        return (time.perf_counter() - started) / _WRITTEN_BYTES
    except OSError:
        return 0.0
    finally:
        os.close(fd)


def _expert_bytes(job: Job) -> int:
    return sum(tensor.spec.nbytes for tensor in job.tensors if isinstance(tensor, Converted))
