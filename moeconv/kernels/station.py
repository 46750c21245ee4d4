"""How do bytes of the host get to a device and back?

Where host and device have one memory between them, they do not: kernels read and write what the
host holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

import torch

from moeconv.errors import UnsupportedError
from moeconv.kernels.scalars import global_scales
from moeconv.layouts.verbs import GlobalScale

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Verb
    from moeconv.tensors import Bytes

_PORTABLE_MAPPED: Final = 3
"""Flags of `cudaHostRegister`: pinned for every context, and visible to kernels."""


class Properties(Protocol):
    """What is asked of `torch.cuda.get_device_properties`."""

    @property
    def is_integrated(self) -> int:
        """Whether host and device share their memory chips."""
        ...


class Batches(Protocol):
    """What is asked of kernels: `layouts.verbs.DeviceKernels` has it."""

    def lay_out_batch(self, verb: Verb, sources: torch.Tensor, outs: torch.Tensor) -> None:
        """Fill each row of `outs`."""
        ...


def is_unified(properties: Properties) -> bool:
    """Return whether a copy to the device would be a second copy in the same memory.

    So it is on integrated GPUs (Jetson, GB10). A GPU with memory of its own is faster from there,
    also where it could read the host's (GH200).
    """
    return bool(properties.is_integrated)


class Station:
    """Device memory and a stream, for one batch at a time.

    Parameters
    ----------
    kernels, device
        What lays out, and where.
    sizes
        Bytes of the largest batch: sources, results.
    copies
        The device has memory of its own.
    """

    def __init__(
        self,
        kernels: Batches,
        device: torch.device,
        sizes: tuple[int, int],
        *,
        copies: bool,
    ) -> None:
        self._kernels, self._device, self._copies = kernels, device, copies
        self._memory = [
            torch.empty(size if copies else 0, dtype=torch.uint8, device=device) for size in sizes
        ]
        self._seen: dict[tuple[torch.Size, ...], tuple[torch.Tensor, ...]] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # A thread that spins while it waits takes a core from the others.
        self._done = torch.cuda.Event(blocking=True) if self._stream else None

    def lay_out(self, verb: Verb, sources: Bytes, outs: Bytes) -> None:
        """Fill each row of `outs` (pinned host bytes) with that row of `sources` laid out."""
        if isinstance(verb, GlobalScale):
            # A number an expert is not worth the way.
            global_scales(verb, sources.reshape(len(sources), -1), outs)
            return
        source, out = (torch.from_numpy(x.reshape(len(x), -1)) for x in (sources, outs))
        with torch.cuda.stream(self._stream):
            if self._copies:
                there, laid = self._views(source.shape, out.shape)
                there.copy_(source, non_blocking=True)
                self._kernels.lay_out_batch(verb, there, laid)
                out.copy_(laid, non_blocking=True)
            else:
                seen = (_seen_by(self._device, x) for x in (source, out))
                self._kernels.lay_out_batch(verb, *seen)
        if self._done is not None:
            self._done.record(self._stream)
            self._done.synchronize()

    def _views(self, *shapes: torch.Size) -> tuple[torch.Tensor, ...]:
        """Return the device's memory as tensors of the sides of a batch; few batches differ."""
        if shapes not in self._seen:
            self._seen[shapes] = tuple(
                memory[: shape.numel()].view(shape)
                for memory, shape in zip(self._memory, shapes, strict=True)
            )
        return self._seen[shapes]


@contextmanager
def pinned(memory: Bytes, device: torch.device) -> Iterator[None]:
    """Pin host memory while the block runs, so that copies need no other and run beside work.

    Raises
    ------
    UnsupportedError
        The driver refuses.
    """
    if device.type != "cuda":
        yield
        return
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    with torch.cuda.device(device):
        error = int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE_MAPPED))
    if error:
        message = f"`{device}` cannot pin {memory.nbytes} bytes of host memory: CUDA error {error}"
        raise UnsupportedError(message, hint="a smaller `--max-host-memory` may do")
    try:
        yield
    finally:
        runtime.cudaHostUnregister(address)


class _Mapped:
    """Host memory under its address on the device, as other libraries hand arrays to torch."""

    def __init__(self, x: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape),
            "typestr": "|u1",
            "data": (x.data_ptr(), False),
            "version": 3,
        }


def _seen_by(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """Return pinned host memory as a tensor of the device, without a copy."""
    return torch.as_tensor(_Mapped(x), device=device) if device.type == "cuda" else x
