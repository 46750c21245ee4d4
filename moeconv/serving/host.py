"""Fill host memory: what keeps its order is read in place, all else passes a buffer once."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moeconv.serving.runs import put, zero_tails
from moeconv.serving.steps import Step, each, expect, in_file_order, read, steps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moeconv.output.files import Files
    from moeconv.serving.rank import RankTensor
    from moeconv.serving.runs import Shape
    from moeconv.tensors import Bytes


class Staging(threading.local):
    """A host buffer a thread, made when it is first asked for."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffer: Bytes | None = None

    def buffer(self) -> Bytes:
        """Return this thread's buffer."""
        if self._buffer is None:
            self._buffer = np.empty(self._nbytes, np.uint8)
        return self._buffer


@dataclass(frozen=True, slots=True)
class HostTarget:
    """Host memory, as bytes, of one tensor."""

    tensor: RankTensor
    shape: Shape
    out: Bytes


def fill_host(files: Files, targets: Iterable[HostTarget], threads: int, slot: int) -> None:
    """Fill all targets through a buffer of `slot` bytes a thread.

    Raises
    ------
    VerifyError
        A file is short.
    """
    targets, staging = in_file_order(targets), Staging(slot)
    for target in targets:
        zero_tails(target.shape, target.out)

    def take(step: Step[HostTarget]) -> None:
        if step.target.shape.is_plain:
            _read_in_place(files, step)
            return
        raw = staging.buffer()[: step.run.nbytes]
        read(files, step, raw)
        put(step.target.shape, step.run, raw, step.target.out)

    each(threads, steps(targets, slot), take)


def _read_in_place(files: Files, step: Step[HostTarget]) -> None:
    expect(files, step)
    run = step.run
    experts = step.target.out.reshape(-1, *step.target.shape.final)
    whole = run.size == experts.shape[1] and run.is_contiguous
    several, rows = run.count if whole else 1, slice(run.rows.start, run.rows.stop)
    for i in range(0, run.count, several):
        target = experts[run.expert + i : run.expert + i + several, rows]
        files.read(run.file, run.begin + i * run.step, target)
