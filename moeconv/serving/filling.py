"""Fill memory with a rank's bytes: several threads, a small staging buffer each.

The memory is the caller's: host bytes, or a torch tensor on the host or on a GPU. What keeps its
order on the host is read where it belongs; all else passes a staging buffer once.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np
import xxhash

from moeconv.errors import VerifyError
from moeconv.serving.runs import Run, Shape, expert_bytes, held, put, runs, shape_of, zero_tails
from moeconv.tensors import round_up

if TYPE_CHECKING:
    import torch

    from moeconv.output.files import Files
    from moeconv.output.manifest import TensorEntry
    from moeconv.serving.reader import RankTensor
    from moeconv.tensors import Bytes

    Out: TypeAlias = Bytes | torch.Tensor

STAGING_BYTES: Final = 64_000_000
"""All staging buffers of one call together; more where a row of some tensor needs it."""

_PAGE: Final = 4096
_MAX_THREADS: Final = 8


class Target(Protocol):
    """Memory of one tensor, on one device."""

    def zero_tails(self) -> None:
        """Write the zeros with which the engine pads."""
        ...

    def take(self, run: Run) -> None:
        """Read a run into its place; called from any thread."""
        ...


def default_threads() -> int:
    """Return how many threads read where the caller does not say.

    Four filled an H200 fastest from the page cache (19 GB/s; eight 10, sixteen 4): more of them
    mostly wait for the interpreter, and each has less of the staging memory.
    """
    return min(4, os.cpu_count() or 1)


def fill(
    files: Files, assignments: Sequence[tuple[RankTensor, Out]], threads: int, *, check: bool
) -> None:
    """Fill every tensor's memory; sizes are checked before a byte is read.

    Raises
    ------
    ValueError
        Some memory is not contiguous or of another size than its tensor.
    VerifyError
        A file is short, or a digest differs.
    """
    outs = [_check_out(tensor, out) for tensor, out in assignments]
    shapes = [shape_of(tensor) for tensor, _ in assignments]
    work = list(zip([tensor for tensor, _ in assignments], shapes, outs, strict=True))
    largest = max((shape.row_bytes for shape in shapes), default=0)
    slot = max(STAGING_BYTES // (2 * threads) // _PAGE * _PAGE, round_up(largest, _PAGE))
    if check:
        _each(threads, _checks(files, [tensor for tensor, _ in assignments], slot))
    host = [(tensor, shape, out) for tensor, shape, out in work if isinstance(out, np.ndarray)]
    staging = _Staging(slot)
    targets: list[tuple[RankTensor, Shape, Target]] = [
        (tensor, shape, HostTarget(files, staging, shape, out)) for tensor, shape, out in host
    ]
    _each(threads, _takes(targets, slot))
    device = [(t, shape, out) for t, shape, out in work if not isinstance(out, np.ndarray)]
    if device:
        from moeconv.serving.cuda import CudaStaging, CudaTarget

        with CudaStaging(device[0][2].device, threads, slot) as lanes:
            moved: list[tuple[RankTensor, Shape, Target]] = [
                (tensor, shape, CudaTarget(files, lanes, shape, out))
                for tensor, shape, out in device
            ]
            _each(threads, _takes(moved, slot))


class HostTarget:
    """Satisfies `Target` in host memory."""

    def __init__(self, files: Files, staging: _Staging, shape: Shape, out: Bytes) -> None:
        self._files, self._staging, self._shape, self._out = files, staging, shape, out

    def zero_tails(self) -> None:
        """Write the zeros with which the engine pads."""
        zero_tails(self._shape, self._out)

    def take(self, run: Run) -> None:
        """Read a run into its place."""
        if self._shape.is_plain:
            experts = self._out.reshape(-1, *self._shape.final)
            whole = run.size == experts.shape[1] and run.is_contiguous
            step, rows = run.count if whole else 1, slice(run.rows.start, run.rows.stop)
            for i in range(0, run.count, step):
                target = experts[run.expert + i : run.expert + i + step, rows]
                self._files.read(run.file, run.begin + i * run.step, target)
            return
        raw = self._staging.buffer()[: run.nbytes]
        read_run(self._files, run, raw)
        put(self._shape, run, raw, self._out)


class _Staging(threading.local):
    """A host buffer a thread, made when it is first asked for."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffer: Bytes | None = None

    def buffer(self) -> Bytes:
        """Return this thread's buffer."""
        if self._buffer is None:
            self._buffer = np.empty(self._nbytes, np.uint8)
        return self._buffer


def read_run(files: Files, run: Run, raw: Bytes) -> None:
    """Read a run's bytes, expert behind expert."""
    if run.is_contiguous:
        files.read(run.file, run.begin, raw)
        return
    for i in range(run.count):
        files.read(run.file, run.begin + i * run.step, raw[i * run.size : (i + 1) * run.size])


def _takes(
    targets: Iterable[tuple[RankTensor, Shape, Target]], slot: int
) -> Iterator[Callable[[], None]]:
    for tensor, shape, target in targets:
        target.zero_tails()
        for run in runs(tensor, shape, slot):
            yield partial(target.take, run)


def _checks(files: Files, tensors: Iterable[RankTensor], slot: int) -> Iterator[Callable[[], None]]:
    staging = _Staging(slot)
    for tensor in tensors:
        for entry, experts in held(tensor):
            for expert in experts:
                yield partial(_check, files, staging, entry, expert)


def _check(files: Files, staging: _Staging, entry: TensorEntry, expert: int) -> None:
    """Compare the digest of one whole stored expert."""
    size, buffer = expert_bytes(entry), staging.buffer()
    begin, digest = entry.begin + (expert - entry.first) * size, xxhash.xxh3_128()
    for at in range(0, size, max(buffer.nbytes, 1)):
        chunk = buffer[: min(buffer.nbytes, size - at)]
        files.read(entry.file, begin + at, chunk)
        digest.update(chunk)
    found, expected = digest.hexdigest(), entry.xxh3[expert - entry.first]
    if found != expected:
        message = (
            f"expert {expert} of `{entry.name}` in `{entry.file}` is damaged: expected "
            f"XXH3 {expected}, found {found}"
        )
        raise VerifyError(message, hint="copy this file again; `moeconv verify` names all")


def _each(threads: int, work: Iterable[Callable[[], None]]) -> None:
    """Do all the work on so many threads; the first failure stops the rest."""
    if threads == 1:
        for step in work:
            step()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="moeconv") as pool:
        futures = [pool.submit(step) for step in work]
        done, rest = wait(futures, return_when=FIRST_EXCEPTION)
        for future in rest:
            future.cancel()
        for future in done:
            future.result()


def _check_out(tensor: RankTensor, out: Out) -> Out:
    """Return host memory as bytes, and GPU memory as it is, if the size is right."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out, torch.Tensor):
        if not out.is_contiguous() or out.nbytes != tensor.nbytes:
            raise ValueError(_wrong(tensor, out.nbytes, contiguous=out.is_contiguous()))
        return out if out.is_cuda else _host_bytes(out)
    array = np.asarray(out)
    if not array.flags.c_contiguous or array.nbytes != tensor.nbytes:
        raise ValueError(_wrong(tensor, array.nbytes, contiguous=array.flags.c_contiguous))
    return array.reshape(-1).view(np.uint8)


def _host_bytes(out: torch.Tensor) -> Bytes:
    import torch

    array: Bytes = out.detach().view(-1).view(torch.uint8).numpy()
    return array


def _wrong(tensor: RankTensor, nbytes: int, *, contiguous: bool) -> str:
    what = f"{nbytes} bytes" if contiguous else "memory with gaps"
    return f"`{tensor.prefix}.{tensor.param}` takes {tensor.nbytes} contiguous bytes, not {what}"
