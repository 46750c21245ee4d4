"""What is read next, and by whom? All reads, in the order of the files.

A disk gives most when more requests wait for it than there are threads, so ranges are named to the
kernel some way before they are read. Naming what is in the page cache costs next to nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from moeconv.serving.runs import runs

if TYPE_CHECKING:
    from moeconv.output.files import Files
    from moeconv.serving.rank import RankTensor
    from moeconv.serving.runs import Run, Shape
    from moeconv.tensors import Bytes

AHEAD_BYTES: Final = 256_000_000
"""How far ahead of the reads the kernel is told of them."""


class Target(Protocol):
    """Memory of one tensor, on one device."""

    @property
    def tensor(self) -> RankTensor:
        """Whose memory it is."""
        ...

    @property
    def shape(self) -> Shape:
        """How its experts are placed."""
        ...


T = TypeVar("T")
TargetT = TypeVar("TargetT", bound=Target)


@dataclass(frozen=True, slots=True)
class Step(Generic[TargetT]):
    """One read into a target's memory, and the later reads to tell the kernel of before it."""

    target: TargetT
    run: Run
    later: tuple[Run, ...]


def steps(targets: Iterable[TargetT], slot: int) -> Iterator[Step[TargetT]]:
    """Yield all reads of all targets, none above `slot` bytes if a row is not."""
    waiting: deque[tuple[TargetT, Run]] = deque()
    later: list[Run] = []
    ahead = 0
    for target in targets:
        for run in runs(target.tensor, target.shape, slot):
            waiting.append((target, run))
            later.append(run)
            ahead += run.nbytes
            while ahead > AHEAD_BYTES:
                owner, first = waiting.popleft()
                ahead -= first.nbytes
                yield Step(owner, first, tuple(later))
                later.clear()
    for owner, run in waiting:
        yield Step(owner, run, tuple(later))
        later.clear()


def read(files: Files, step: Step[TargetT], raw: Bytes) -> None:
    """Read a step's bytes, expert behind expert, and tell the kernel of later ones."""
    expect(files, step)
    run = step.run
    if run.is_contiguous:
        files.read(run.file, run.begin, raw)
        return
    for i in range(run.count):
        files.read(run.file, run.begin + i * run.step, raw[i * run.size : (i + 1) * run.size])


def expect(files: Files, step: Step[TargetT]) -> None:
    """Tell the kernel which later bytes will be read."""
    for run in step.later:
        if run.is_contiguous:
            files.expect(run.file, run.begin, run.nbytes)
            continue
        for i in range(run.count):
            files.expect(run.file, run.begin + i * run.step, run.size)


class Shared(Generic[T]):
    """Items that several threads take from, each once, until one of them stops it."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next item to whoever asks first."""
        with self._lock:
            return next(self._items)

    def stop(self) -> None:
        """Give out nothing more."""
        with self._lock:
            self._items = iter(())


def each(threads: int, items: Iterable[T], do: Callable[[T], None]) -> None:
    """Do something for all items on so many threads; the first failure stops the rest."""
    shared = Shared(items)

    def work() -> None:
        try:
            for item in shared:
                do(item)
        finally:
            shared.stop()

    if threads == 1:
        work()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="moeconv") as pool:
        workers = [pool.submit(work) for _ in range(threads)]
        try:
            for worker in workers:
                worker.result()
        finally:
            shared.stop()


def in_file_order(targets: Iterable[TargetT]) -> Sequence[TargetT]:
    """Return the targets in the order of their bytes on the disk."""

    def place(target: TargetT) -> tuple[str, int]:
        first = target.tensor.pieces[0]
        return first.file, first.begin

    return sorted(targets, key=place)
