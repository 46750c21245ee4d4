"""Fill GPU memory: threads read into pinned slots, and one thread queues all copies.

Reading leaves the interpreter alone, queueing needs it: threads that did both would mostly wait for
each other. What keeps its order is copied where it belongs; what does not passes a device buffer
and is placed by one strided copy. Neither needs an index or a second tensor.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import torch

from moeconv.serving.steps import Shared, Step, in_file_order, read, steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moeconv.output.files import Files
    from moeconv.serving.rank import RankTensor
    from moeconv.serving.runs import Run, Shape
    from moeconv.tensors import Bytes

SPARE_SLOTS: Final = 3
"""Slots beyond one a thread: two whose copies are under way, and one that was just read."""


@dataclass(frozen=True, slots=True)
class CudaTarget:
    """GPU memory of one tensor."""

    tensor: RankTensor
    shape: Shape
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Slot:
    """A pinned buffer, and when what it held is copied."""

    pinned: torch.Tensor
    host: Bytes
    copied: torch.cuda.Event


def fill_cuda(files: Files, targets: Iterable[CudaTarget], threads: int, slot: int) -> None:
    """Fill all targets, which are on one device, through `threads` + 3 slots of `slot` bytes.

    Raises
    ------
    VerifyError
        A file is short.
    """
    targets = in_file_order(targets)
    filling = _Filling(targets, threads, slot)
    shared = Shared(steps(targets, slot))
    with ThreadPoolExecutor(threads, thread_name_prefix="moeconv") as pool:
        readers = [pool.submit(filling.read, files, shared) for _ in range(threads)]
        try:
            filling.place_all(threads)
        finally:
            shared.stop()
            filling.release(threads)
    for reader in readers:
        reader.result()


class _Filling:
    """The slots and the stream of one call; a slot goes from free to read to copied to free."""

    def __init__(self, targets: Sequence[CudaTarget], threads: int, slot: int) -> None:
        device = targets[0].out.device
        count = threads + SPARE_SLOTS
        pinned = torch.empty(count * slot, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._free: SimpleQueue[_Slot | None] = SimpleQueue()
        for part in pinned.split(slot):
            self._free.put(_Slot(part, part.numpy(), torch.cuda.Event()))
        self._full: SimpleQueue[tuple[Step[CudaTarget], _Slot] | None] = SimpleQueue()
        is_staged = any(not target.shape.is_plain for target in targets)
        self._staged = torch.empty(slot * is_staged, dtype=torch.uint8, device=device)
        self._views: dict[tuple[Shape, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._experts = {id(target): _experts(target) for target in targets}
        for target in targets:
            for window in target.shape.tails():
                self._experts[id(target)][(slice(None), *window)].zero_()
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def read(self, files: Files, shared: Shared[Step[CudaTarget]]) -> None:
        """Read step after step into free slots; on a reader's own thread."""
        try:
            for step in shared:
                slot = self._free.get()
                if slot is None:
                    return
                read(files, step, slot.host[: step.run.nbytes])
                self._full.put((step, slot))
        finally:
            shared.stop()
            self._full.put(None)

    def place_all(self, threads: int) -> None:
        """Queue the copies of whatever is read until all readers are done, and wait for them."""
        copying = deque[_Slot]()
        with torch.cuda.stream(self._stream):
            while threads:
                full = self._full.get()
                if full is None:
                    threads -= 1
                    continue
                step, slot = full
                self._place(step.target, step.run, slot.pinned[: step.run.nbytes])
                slot.copied.record(self._stream)
                copying.append(slot)
                if len(copying) == SPARE_SLOTS:
                    copying[0].copied.synchronize()
                    self._free.put(copying.popleft())
        self._stream.synchronize()

    def release(self, threads: int) -> None:
        """Let readers end that wait for a slot."""
        for _ in range(threads):
            self._free.put(None)

    def _place(self, target: CudaTarget, run: Run, raw: torch.Tensor) -> None:
        window = (slice(run.expert, run.expert + run.count), *target.shape.corner(run.rows))
        place = self._experts[id(target)][window]
        if not target.shape.is_plain:
            staged, source = self._view(target.shape, run)
            staged.copy_(raw, non_blocking=True)
            place.copy_(source)
        elif place.is_contiguous():
            place.view(-1).copy_(raw, non_blocking=True)
        else:
            for to, part in zip(place, raw.view(run.count, -1), strict=True):
                to.view(-1).copy_(part, non_blocking=True)

    def _view(self, shape: Shape, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the device buffer as a run's bytes, and as they are placed; made once a form."""
        key = (shape, run.count, len(run.rows))
        if key not in self._views:
            staged = self._staged[: run.nbytes]
            dims = (run.count, len(run.rows), *shape.stored[1:])
            axes = (0, *(axis + 1 for axis in shape.axes), len(dims))
            self._views[key] = staged, _items(shape, staged, dims).permute(axes)
        return self._views[key]


def _experts(target: CudaTarget) -> torch.Tensor:
    """See a tensor's memory as the items of each expert."""
    raw = target.out.detach().view(-1).view(torch.uint8)
    return _items(target.shape, raw, (-1, *target.shape.final))


def _items(shape: Shape, raw: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """See bytes as items that stay whole, in the widest integers that divide them."""
    for dtype, width in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if shape.item_bytes % width == 0:
            return raw.view(dtype).view(*dims, shape.item_bytes // width)
    return raw.view(*dims, shape.item_bytes)
