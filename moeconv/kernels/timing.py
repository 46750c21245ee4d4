"""How fast do kernels move bytes? A batch of random experts, against a copy of as many bytes.

Rates count bytes read and bytes written. A batch should be several times the caches (an H200's L2:
60 MB); data is random, since a GPU draws less power, and runs faster, on zeros.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from moeconv.layouts.verbs import DeviceKernels

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Kernels, Verb

    _Pair: TypeAlias = tuple[Verb, torch.Tensor, torch.Tensor]

REPEATS: Final = 20
_WARM_UPS: Final = 3
_WARM_S: Final = 0.03
"""A GPU moves a tenth less in the first hundredth of a second of another kernel."""


@dataclass(frozen=True, slots=True)
class Move:
    """One verb, the shape in bytes of one expert's source matrix, and the size of its result."""

    verb: Verb
    source: tuple[int, int]
    out_bytes: int


@dataclass(frozen=True, slots=True)
class Timing:
    """What a run moved.

    Attributes
    ----------
    way
        `copy`, or the name of the kernels.
    nbytes
        Bytes that one run read and wrote.
    seconds
        Median of the runs.
    """

    way: str
    nbytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes read and written over time."""
        return self.nbytes / self.seconds


def time_kernels(
    kernels: Kernels, moves: Sequence[Move], experts: int, *, back: bool = False
) -> Timing:
    """Time all moves of so many experts one after the other: a layer, or one parameter of it.

    Parameters
    ----------
    back
        The inverses, on random results.

    Notes
    -----
    It holds all of both sides on the device: `experts` times the bytes of every move.
    """
    device = torch.device(kernels.device)
    pairs = [
        (
            move.verb,
            _random((experts, *move.source), device),
            _random((experts, move.out_bytes), device),
        )
        for move in moves
    ]

    if isinstance(kernels, DeviceKernels):
        rows = [(verb, sources.view(experts, -1), outs) for verb, sources, outs in pairs]
        run = functools.partial(_move_batches, kernels, rows, back=back)
    else:
        run = functools.partial(_move_each, kernels, pairs, back=back)
    nbytes = sum(sources.numel() + outs.numel() for _, sources, outs in pairs)
    return Timing(kernels.name, nbytes, median_seconds(run, device))


def time_copy(device: str, nbytes: int) -> Timing:
    """Time a copy on a device that reads and writes `nbytes` in all: the ceiling of every move."""
    where = torch.device(device)
    source = _random((nbytes // 2,), where)
    target = torch.empty_like(source)
    return Timing("copy", nbytes, median_seconds(lambda: target.copy_(source), where))


def median_seconds(
    run: Callable[[], object], device: torch.device, repeats: int = REPEATS
) -> float:
    """Return the median time of a run on a device, by its own clock where it is a GPU.

    There all runs are queued before the first is waited for, so that starting one is hidden behind
    the one before it, as it is in a conversion.
    """
    if device.type != "cuda":
        for _ in range(_WARM_UPS):
            run()
        return statistics.median(_seconds_on_host(run) for _ in range(repeats))
    with torch.cuda.device(device):
        begin = time.perf_counter()
        while time.perf_counter() - begin < _WARM_S:
            _seconds_on_gpu(run, _WARM_UPS)
        return statistics.median(_seconds_on_gpu(run, repeats))


def _seconds_on_gpu(run: Callable[[], object], repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(events)]


def _seconds_on_host(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _random(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def _move_batches(kernels: DeviceKernels, pairs: Sequence[_Pair], *, back: bool) -> None:
    for verb, sources, outs in pairs:
        if back:
            kernels.invert_batch(verb, outs, sources)
        else:
            kernels.lay_out_batch(verb, sources, outs)


def _move_each(kernels: Kernels, pairs: Sequence[_Pair], *, back: bool) -> None:
    for verb, *sides in pairs:
        for source, out in zip(*(side.numpy() for side in sides), strict=True):
            if back:
                kernels.invert(verb, out, source)
            else:
                kernels.lay_out(verb, source, out)
