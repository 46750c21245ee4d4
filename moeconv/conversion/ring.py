"""Whose turn is it with which memory? A fixed ring of reused buffers, on the host and on a device.

A slot is host memory for one piece from its reading until its digest. A station is device memory
for one batch while it goes up, is laid out and comes back; that is short, so there are fewer.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

import numpy as np

from moeconv.errors import UnsupportedError
from moeconv.layouts.verbs import DeviceKernels

if TYPE_CHECKING:
    from moeconv.conversion.budget import Budget, Sizes
    from moeconv.layouts.verbs import Kernels, Station, Verb
    from moeconv.tensors import Bytes


@dataclass(frozen=True, slots=True)
class Slot:
    """Host memory of one piece: source matrices, what is read on the way to them, results."""

    source: Bytes
    scratch: Bytes
    out: Bytes


class Ring:
    """The slots and stations of a budget, allocated once; safe to use from several threads.

    Parameters
    ----------
    kernels
        What lays out. Where it has a device, host memory is pinned, so that copies run beside
        everything else: slot by slot, while those that are pinned are in use.
    budget
        How many slots and stations, and their sizes.

    Raises
    ------
    UnsupportedError
        The machine has not so much memory, the device's driver cannot pin one slot of it, or the
        device cannot hold the stations. Where it pins only some slots, those are all there are.
    """

    def __init__(self, kernels: Kernels, budget: Budget) -> None:
        self._kernels, self._slots, self._sizes = kernels, budget.slots, budget.sizes
        self._free: SimpleQueue[Slot] = SimpleQueue()
        self._stations: SimpleQueue[Station] = SimpleQueue()
        self._sharing, self._lock = 0, Lock()
        self._held, self._is_closing = ExitStack(), Event()
        is_pinned = isinstance(kernels, DeviceKernels)
        first, *rest = np.split(_pages(budget.host_bytes, are_pinned=is_pinned), budget.slots)
        if isinstance(kernels, DeviceKernels):
            for _ in range(budget.stations):
                self._stations.put(kernels.station(budget.sizes.source, budget.sizes.out))
        self._add(first)
        self._adding = Thread(target=self._add_all, args=(rest,), name="moeconv-slots")
        self._adding.start()

    def close(self) -> None:
        """Let go of what the device holds; nothing may be borrowed any more."""
        self._is_closing.set()
        self._adding.join()
        self._held.close()

    def _add(self, memory: Bytes) -> None:
        """Make a slot of some memory, pinned where there is a device."""
        if isinstance(self._kernels, DeviceKernels):
            # Pages that are there are pinned sooner: meanwhile the driver does nothing else.
            memory[:: mmap.PAGESIZE] = 0
            self._held.enter_context(self._kernels.pinned(memory))
        self._free.put(_slot(memory, self._sizes))

    def _add_all(self, memories: Iterable[Bytes]) -> None:
        """Add slots as long as they are wanted, and as many as the driver pins."""
        with suppress(UnsupportedError):
            for memory in memories:
                if self._is_closing.is_set():
                    return
                self._add(memory)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Count as one who borrows slots, while the block runs."""
        with self._lock:
            self._sharing += 1
        try:
            yield
        finally:
            with self._lock:
                self._sharing -= 1

    def take(self) -> Slot:
        """Wait for a free slot."""
        return self._free.get()

    def take_another(self, held: int) -> Slot | None:
        """Return a free slot, or none to a thread that should first give back one of `held`.

        That is one that holds its fair share, or finds none free. One that holds none waits.
        """
        if held == 0:
            return self.take()
        if held >= self._slots // max(1, self._sharing):
            return None
        try:
            return self._free.get_nowait()
        except Empty:
            return None

    def give_back(self, slot: Slot) -> None:
        """Let others have a slot."""
        self._free.put(slot)

    def lay_out(self, verb: Verb, sources: Bytes, outs: Bytes) -> None:
        """Fill each row of `outs` `[n, bytes]` with that of `sources` `[n, rows, bytes a row]`."""
        if not isinstance(self._kernels, DeviceKernels):
            for source, out in zip(sources, outs, strict=True):
                self._kernels.lay_out(verb, source, out)
            return
        station = self._stations.get()
        try:
            station.lay_out(verb, sources, outs)
        finally:
            self._stations.put(station)

    @property
    def peak_device_bytes(self) -> int:
        """Most device memory that was taken so far; 0 on the host."""
        return self._kernels.peak_bytes if isinstance(self._kernels, DeviceKernels) else 0


def _pages(nbytes: int, *, are_pinned: bool) -> Bytes:
    """Return fresh memory that starts on a page, so that files can be written past the cache.

    What is pinned is all there at once, so that large pages cost nothing: the driver looks at
    each page, and there are fewer.

    Raises
    ------
    UnsupportedError
        The machine has not so much.
    """
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        message = f"this machine does not give {nbytes} bytes of memory: {error.strerror}"
        hint = "a smaller `--max-host-memory`, or fewer `--workers`, may do"
        raise UnsupportedError(message, hint=hint) from error
    if are_pinned:
        # After a fork, whoever writes to a page first gets another one; the device keeps its own.
        pages.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # the kernel may be built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def _slot(memory: Bytes, sizes: Sizes) -> Slot:
    source, scratch, out, _ = np.split(memory, np.cumsum([sizes.source, sizes.scratch, sizes.out]))
    return Slot(source, scratch, out)
