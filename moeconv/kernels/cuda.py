"""Verbs on a GPU: whatever moves the bytes there, bytes go up and come back here.

One stream a calling thread, so that the copies of one expert overlap the work on another; host
buffers are pinned.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import torch

from moeconv.errors import UnsupportedError
from moeconv.kernels.station import Station, is_unified, pinned
from moeconv.layouts.verbs import GlobalScale

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from moeconv.layouts.verbs import Verb
    from moeconv.tensors import Bytes


class Batch(Protocol):
    """Carries verbs out on tensors of one device; safe to use from several threads."""

    @property
    def name(self) -> str:
        """What its kernels are written in: `torch` or `triton`."""
        ...

    @property
    def spare(self) -> int:
        """Device memory that a call takes beside its arguments, in times the larger of them."""
        ...

    def lay_out_batch(self, verb: Verb, sources: torch.Tensor, outs: torch.Tensor) -> None:
        """Do what `CudaKernels.lay_out_batch` says."""
        ...

    def invert_batch(self, verb: Verb, stored: torch.Tensor, sources: torch.Tensor) -> None:
        """Do what `CudaKernels.invert_batch` says."""
        ...


class CudaKernels:
    """Satisfies `layouts.verbs.DeviceKernels` on one CUDA device.

    Parameters
    ----------
    device
        Its name in torch, as `cuda:0`; `cpu` moves no bytes up or down.
    batch
        Makes what moves the bytes there, such as `kernels.torch.TorchBatch`.

    Raises
    ------
    UnsupportedError
        Torch sees no such device.
    """

    def __init__(self, device: str, batch: Callable[[torch.device], Batch]) -> None:
        self._device = torch.device(device)
        if self._device.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if (self._device.index or 0) >= count:
                message = f"there is no device `{device}`: torch {torch.__version__} sees {count}"
                raise UnsupportedError(message, hint="use `--device cpu`; it writes the same bytes")
        self._copies = self._device.type == "cuda" and not is_unified(
            torch.cuda.get_device_properties(self._device)
        )
        self._local = threading.local()
        self._batch = batch(self._device)

    @property
    def device(self) -> str:
        """The device, as torch names it."""
        return str(self._device)

    @property
    def name(self) -> str:
        """What moves the bytes there: `triton` or `torch`."""
        return self._batch.name

    def lay_out(self, verb: Verb, source: Bytes, out: Bytes) -> None:
        """Fill `out`."""
        self._move(verb, source, out, inverse=False)

    def invert(self, verb: Verb, stored: Bytes, source: Bytes) -> None:
        """Fill `source`."""
        if not isinstance(verb, GlobalScale):
            self._move(verb, stored, source, inverse=True)

    def lay_out_batch(self, verb: Verb, sources: torch.Tensor, outs: torch.Tensor) -> None:
        """Fill every row of `outs` with that row of `sources` laid out.

        Parameters
        ----------
        verb
            One verb for all of them.
        sources
            Source matrices, u8 `[n, source bytes]`, contiguous, on this device.
        outs
            Results, u8 `[n, result bytes]`, contiguous, on this device; no memory in common with
            `sources`.

        Notes
        -----
        It queues work on the device's current stream (`torch.cuda.stream`) and returns; a
        `GlobalScale` waits for its bytes. Both tensors start on a multiple of 16 bytes, as tensors
        that torch allocates do.
        """
        with torch.cuda.device_of(sources):
            self._batch.lay_out_batch(verb, sources, outs)

    def invert_batch(self, verb: Verb, stored: torch.Tensor, sources: torch.Tensor) -> None:
        """Fill every row of `sources` with what that row of `stored` was made from.

        The arguments are those of `lay_out_batch`; what is lost is said at `Kernels.invert`.
        """
        with torch.cuda.device_of(sources):
            self._batch.invert_batch(verb, stored, sources)

    def batch_bytes(self, source_bytes: int, out_bytes: int) -> int:
        """Return the device memory of a batch: both copies, and what the kernels need beside."""
        copies = source_bytes + out_bytes if self._copies else 0
        return copies + self._batch.spare * max(source_bytes, out_bytes)

    def station(self, source_bytes: int, out_bytes: int) -> Station:
        """Return a place for batches of at most such sizes.

        Raises
        ------
        UnsupportedError
            The device has no memory for it.
        """
        try:
            return Station(self, self._device, (source_bytes, out_bytes), copies=self._copies)
        except torch.OutOfMemoryError as error:
            message = f"`{self._device}` has no {source_bytes + out_bytes} bytes free"
            hint = "is it in use? `--device cpu` writes the same bytes"
            raise UnsupportedError(message, hint=hint) from error

    def pinned(self, memory: Bytes) -> AbstractContextManager[None]:
        """Pin host memory while the block runs."""
        return pinned(memory, self._device)

    @property
    def peak_bytes(self) -> int:
        """Most device memory that torch took so far; the driver's own, some 0.5 GB, is beside."""
        if self._device.type != "cuda":
            return 0
        return torch.cuda.max_memory_reserved(self._device)

    def _move(self, verb: Verb, given: Bytes, wanted: Bytes, *, inverse: bool) -> None:
        batch = self.invert_batch if inverse else self.lay_out_batch
        host = [torch.from_numpy(x.reshape(1, -1)) for x in (given, wanted)]
        if self._device.type != "cuda":
            batch(verb, *host)
            return
        stream = self._stream()
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            there = host[0].to(self._device, non_blocking=True)
            moved = torch.empty_like(host[1], device=self._device)
            batch(verb, there, moved)
            host[1].copy_(moved, non_blocking=True)
        stream.synchronize()

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)
        stream: torch.cuda.Stream = self._local.stream
        return stream
