"""Slots are there as soon as they are pinned, and as many as the driver pins."""

from __future__ import annotations

import re
import threading
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moeconv.conversion.budget import Budget, Limits, Sizes
from moeconv.conversion.convert import convert
from moeconv.conversion.ring import Ring
from moeconv.errors import UnsupportedError
from moeconv.kernels.cpu import CpuKernels
from moeconv.kernels.cuda import CudaKernels
from moeconv.kernels.torch import TorchBatch
from moeconv.output.directory import OutputDirectory
from tests import runs

if TYPE_CHECKING:
    from moeconv.tensors import Bytes

BUDGET = Budget(Sizes(4096, 0, 4096), slots=8, stations=1, station_bytes=8192)


class Stingy(CudaKernels):
    """A device whose driver pins only so many slots, or waits until it may pin the second."""

    def __init__(self, most: int, go_on: threading.Event | None = None) -> None:
        super().__init__("cpu", TorchBatch)
        self.most, self.pinned_bytes, self.go_on = most, 0, go_on

    def pinned(self, memory: Bytes) -> AbstractContextManager[None]:
        if self.most == 0:
            raise UnsupportedError("no more")
        if self.pinned_bytes and self.go_on:
            assert self.go_on.wait(30)
        self.most -= 1
        self.pinned_bytes += memory.nbytes
        return nullcontext()


def test_the_first_slot_is_used_while_others_are_pinned():
    go_on = threading.Event()
    kernels = Stingy(8, go_on)
    with closing(Ring(kernels, BUDGET)) as ring:
        assert ring.take().source.nbytes == 4096
        assert ring.take_another(1) is None
        go_on.set()
        slots = [ring.take() for _ in range(7)]
        assert len({slot.source.ctypes.data for slot in slots}) == 7
        assert ring.take_another(1) is None
    assert kernels.pinned_bytes == BUDGET.host_bytes


def test_a_ring_that_is_closed_early_pins_no_more():
    go_on = threading.Event()
    kernels = Stingy(8, go_on)
    ring = Ring(kernels, BUDGET)
    threading.Timer(0.1, go_on.set).start()
    ring.close()
    assert kernels.pinned_bytes <= 2 * BUDGET.sizes.total


def test_memory_that_the_machine_does_not_have_is_said():
    with pytest.raises(UnsupportedError, match="does not give 4503599627370496 bytes") as error:
        Ring(CpuKernels(), Budget(Sizes(1 << 40, 0, 0), slots=1 << 12))
    assert "--max-host-memory" in (error.value.hint or "")


def test_processes_that_are_forked_leave_pinned_memory_where_it_is():
    """Else the next to write to a page gets another one, and the device sees it no more."""
    with closing(Ring(Stingy(8), BUDGET)) as ring:
        address = ring.take().source.ctypes.data
        smaps = Path("/proc/self/smaps").read_text()
        # Of each range of addresses, where it ends, and its flags.
        found = re.findall(r"(?ms)^[0-9a-f]+-([0-9a-f]+) .*?^VmFlags: (.*?)$", smaps)
        flags = next(flags for end, flags in found if address < int(end, 16))
        assert "dc" in flags.split()


def test_a_driver_that_pins_nothing_is_said():
    with pytest.raises(UnsupportedError, match="no more"):
        Ring(Stingy(0), BUDGET)


def test_a_driver_that_pins_few_slots_is_enough(source, converted, tmp_path):
    plan, checkpoint = runs.plan(source)
    directory = OutputDirectory(tmp_path / "out", plan.id, plan.identity)
    for _ in convert(plan, checkpoint, directory, Stingy(2), Limits(3)):
        pass
    assert runs.tree(tmp_path / "out") == runs.tree(converted)
