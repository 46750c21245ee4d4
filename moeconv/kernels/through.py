"""How fast do files go through a GPU where nothing is computed? Read, up, back, write."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

if TYPE_CHECKING:
    _Piece: TypeAlias = tuple[int, int, int, int]

_PIECE_BYTES: Final = 1 << 24
_MOST_THREADS: Final = 16


class Through:
    """Threads' buffers for copies through a device: pinned on the host, kept from run to run.

    Parameters
    ----------
    device
        Its name in torch, as `cuda:0`.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        count = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._lanes = [_Lane(self._device) for _ in range(count)]

    def copy(self, files: Iterable[Path], out: Path) -> None:
        """Copy files into a new folder through the device, and make them durable."""
        out.mkdir()
        pieces: SimpleQueue[_Piece] = SimpleQueue()
        with ExitStack() as opened:
            written = []
            for path in files:
                source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, source)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                target = os.open(out / path.name, flags)
                opened.callback(os.close, target)
                written.append(target)
                size = path.stat().st_size
                os.ftruncate(target, size)
                for at in range(0, size, _PIECE_BYTES):
                    pieces.put((source, target, at, min(_PIECE_BYTES, size - at)))
            threads = [threading.Thread(target=lane.move, args=(pieces,)) for lane in self._lanes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for target in written:
                os.fsync(target)


class _Lane:
    """Buffers and a stream of one thread."""

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._up, self._down = (
            torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
        )
        self._there = torch.empty(_PIECE_BYTES, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if pinned else None

    def move(self, pieces: SimpleQueue[_Piece]) -> None:
        """Move pieces until there are no more."""
        for source, target, at, size in _drained(pieces):
            os.preadv(source, [memoryview(self._up.numpy())[:size]], at)
            with torch.cuda.stream(self._stream):
                self._there[:size].copy_(self._up[:size], non_blocking=True)
                self._down[:size].copy_(self._there[:size], non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()
            os.pwrite(target, memoryview(self._down.numpy())[:size], at)


def _drained(pieces: SimpleQueue[_Piece]) -> Iterator[_Piece]:
    try:
        while True:
            yield pieces.get_nowait()
    except Empty:
        return
