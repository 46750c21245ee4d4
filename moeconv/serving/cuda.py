"""Fill GPU memory: pinned staging, a stream and a small device buffer a thread.

What keeps its order is copied where it belongs; what does not passes the thread's device buffer and
is placed by one strided copy. Neither needs an index or a second tensor.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from moeconv.serving.filling import read_run

if TYPE_CHECKING:
    from moeconv.output.files import Files
    from moeconv.serving.runs import Run, Shape
    from moeconv.tensors import Bytes


class _Lane:
    """One thread's stream, device buffer, and two pinned buffers: one read into, one copied."""

    def __init__(self, device: torch.device, pinned: torch.Tensor, slot: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.staged = torch.empty(slot, dtype=torch.uint8, device=device)
        self._slots = [(pinned[i * slot :][:slot], torch.cuda.Event()) for i in range(2)]

    def slot(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Return the pinned buffer whose copy is the older one, once that is done."""
        self._slots.reverse()
        pinned, event = self._slots[0]
        event.synchronize()
        return pinned, event


class CudaStaging:
    """The lanes of all threads that fill one device.

    Parameters
    ----------
    device
        Whose memory is filled.
    threads, slot
        How many lanes, and bytes of each of their buffers.
    """

    def __init__(self, device: torch.device, threads: int, slot: int) -> None:
        pinned = torch.empty(2 * threads * slot, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._free = [_Lane(device, pinned[2 * i * slot :], slot) for i in range(threads)]
        self._lanes = tuple(self._free)
        self._local = _Local()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for lane in self._lanes:
            lane.stream.synchronize()

    def lane(self) -> _Lane:
        """Return this thread's lane."""
        if self._local.lane is None:
            self._local.lane = self._free.pop()
        return self._local.lane


class _Local(threading.local):
    """What a thread has."""

    lane: _Lane | None = None


class CudaTarget:
    """Satisfies `filling.Target` in GPU memory."""

    def __init__(self, files: Files, staging: CudaStaging, shape: Shape, out: torch.Tensor) -> None:
        self._files, self._staging, self._shape = files, staging, shape
        self._experts = _items(shape, out.detach().view(-1).view(torch.uint8), (-1, *shape.final))

    def zero_tails(self) -> None:
        """Write the zeros with which the engine pads."""
        for window in self._shape.tails():
            self._experts[(slice(None), *window)].zero_()

    def take(self, run: Run) -> None:
        """Read a run and queue its copies; a buffer is used again when they are done."""
        lane = self._staging.lane()
        pinned, event = lane.slot()
        raw = pinned[: run.nbytes]
        host: Bytes = raw.numpy()
        read_run(self._files, run, host)
        with torch.cuda.stream(lane.stream):
            self._place(run, raw, lane.staged[: run.nbytes])
            event.record(lane.stream)

    def _place(self, run: Run, raw: torch.Tensor, staged: torch.Tensor) -> None:
        shape = self._shape
        dims = (run.count, len(run.rows), *shape.stored[1:])
        window = (slice(run.expert, run.expert + run.count), *shape.corner(run.rows))
        target = self._experts[window]
        if not shape.is_plain:
            staged.copy_(raw, non_blocking=True)
            axes = (0, *(axis + 1 for axis in shape.axes), len(dims))
            target.copy_(_items(shape, staged, dims).permute(axes))
        elif target.is_contiguous():
            target.view(-1).copy_(raw, non_blocking=True)
        else:
            for to, source in zip(target, raw.view(run.count, -1), strict=True):
                to.view(-1).copy_(source, non_blocking=True)


def _items(shape: Shape, raw: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """See bytes as items that stay whole, in the widest integers that divide them."""
    for dtype, width in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if shape.item_bytes % width == 0:
            return raw.view(dtype).view(*dims, shape.item_bytes // width)
    return raw.view(*dims, shape.item_bytes)
