"""Verbs on a GPU, in torch indexing.

Bytes go up, are gathered there and come back, on one stream a calling thread, so that the copies
of one expert overlap the work on another. Buffers are pinned.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from moeconv.errors import UnsupportedError
from moeconv.kernels.rowmaps import block_index, inverse_block_index
from moeconv.layouts.verbs import K_BLOCK_BYTES

if TYPE_CHECKING:
    from moeconv.kernels.rowmaps import Index
    from moeconv.layouts.verbs import Verb
    from moeconv.tensors import Bytes


class CudaKernels:
    """Satisfies `layouts.verbs.Kernels` on one CUDA device.

    Raises
    ------
    UnsupportedError
        Torch sees no such device.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        index = self._device.index or 0
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            message = f"there is no device `{device}`: torch {torch.__version__} sees {count} GPUs"
            raise UnsupportedError(message, hint="use `--device cpu`; it writes the same bytes")
        self._local = threading.local()
        self._indexes: dict[tuple[Verb, bool], torch.Tensor] = {}
        self._lock = threading.Lock()

    @property
    def device(self) -> str:
        """The device, as torch names it."""
        return str(self._device)

    def empty(self, nbytes: int) -> Bytes:
        """Return a pinned host buffer."""
        return np.asarray(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy())

    def lay_out(self, verb: Verb, source: Bytes, out: Bytes) -> None:
        """Gather whole blocks on the device."""
        self._gather(self._index(verb, inverse=False), source, out)

    def invert(self, verb: Verb, stored: Bytes, source: Bytes) -> None:
        """Gather whole blocks back on the device."""
        self._gather(self._index(verb, inverse=True), stored, source)

    def _index(self, verb: Verb, *, inverse: bool) -> torch.Tensor:
        with self._lock:
            key = (verb, inverse)
            if key not in self._indexes:
                index: Index = inverse_block_index(verb) if inverse else block_index(verb)
                self._indexes[key] = torch.from_numpy(index).to(self._device)
                torch.cuda.synchronize(self._device)
            return self._indexes[key]

    def _gather(self, index: torch.Tensor, source: Bytes, out: Bytes) -> None:
        stream = self._stream()
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            items = torch.from_numpy(source.reshape(-1)).view(torch.int64)
            there = items.to(self._device, non_blocking=True).view(-1, K_BLOCK_BYTES // 8)
            moved = there.index_select(0, index).view(-1)
            torch.from_numpy(out.reshape(-1)).view(torch.int64).copy_(moved, non_blocking=True)
        stream.synchronize()

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)
        stream: torch.cuda.Stream = self._local.stream
        return stream
