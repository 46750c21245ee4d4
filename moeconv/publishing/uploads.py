"""Shards on their way to the Hub while others are made, on a bounded disk.

One thread sends shards in the order they became durable and commits them to the work branch, each
with its record: then no other process, nor another machine, makes or sends them again. Where the
disk is bounded, a shard is removed once its commit is made and noted, and the conversion waits
while the next one would not fit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from moeconv.errors import MoeconvError, VerifyError
from moeconv.output.codec import encode
from moeconv.output.durable import writing
from moeconv.output.hub import addition
from moeconv.output.records import UPLOADED, ShardRecord
from moeconv.output.tree import holds
from moeconv.paths import sha256_of
from moeconv.publishing.sent import Sent

if TYPE_CHECKING:
    from moeconv.output.directory import OutputDirectory
    from moeconv.output.hub import Operation, Repository
    from moeconv.output.tree import Held

RECORDS: Final = ".moeconv/records"
"""Where the work branch has the records of its shards, by the number of the job."""

_COMMIT_EVERY_S: Final = 30.0
_POLL_S: Final = 0.2
_LAST_WORDS_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Bound:
    """How much disk all shards together may take, and how much the largest of them takes."""

    max_bytes: int
    largest_bytes: int


@dataclass(frozen=True, slots=True)
class Book:
    """The directory whose records are kept, and the number of the job of each shard."""

    directory: OutputDirectory
    numbers: Mapping[str, int]


class Uploads:
    """Shards on their way.

    Parameters
    ----------
    repository
        Where to.
    root
        The directory they are in.
    there
        What the work branch holds already.
    book
        Where it is noted that a shard is on the Hub; `None` for a directory that is sealed.
    bound
        Remove shards that are on the Hub, to stay below this; `None` to keep them.
    """

    def __init__(
        self,
        repository: Repository,
        root: Path,
        there: Mapping[str, Held],
        book: Book | None = None,
        bound: Bound | None = None,
    ) -> None:
        self._repository, self._root, self._there = repository, root, there
        self._book, self._bound = book, bound
        self._todo: queue.SimpleQueue[ShardRecord | None] = queue.SimpleQueue()
        self._taken: set[str] = set()
        self._ready: list[tuple[ShardRecord, Operation]] = []
        self._committed_s = time.monotonic()
        self._changed = threading.Condition()
        self._staged_bytes = self._sent_bytes = 0
        self._failure: MoeconvError | None = None
        self._is_over = threading.Event()
        # A daemon: an interrupted run ends in the middle of a shard, which takes minutes to send.
        self._thread = threading.Thread(target=self._run, name="moeconv-upload", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._todo.put(None)
        self._thread.join(_LAST_WORDS_S)

    def take(self, shard: ShardRecord) -> Iterator[Sent]:
        """Send a durable shard; return when the next one fits on the disk.

        A shard that was taken, or whose record says that it is on the Hub, is passed over.

        Raises
        ------
        OutputError
            The Hub refused this one or an earlier one.
        """
        if shard.file in self._taken:
            return
        self._taken.add(shard.file)
        if shard.state == UPLOADED:
            return
        with self._changed:
            self._staged_bytes += shard.size
        self._todo.put(shard)
        yield from self._wait(self._fits)

    def drain(self) -> Iterator[Sent]:
        """Return when everything that was taken is on the Hub."""
        self._todo.put(None)
        yield from self._wait(lambda: self._staged_bytes == 0)

    def _fits(self) -> bool:
        bound = self._bound
        return bound is None or self._staged_bytes + bound.largest_bytes <= bound.max_bytes

    def _wait(self, is_enough: Callable[[], bool]) -> Iterator[Sent]:
        while True:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                sent, self._sent_bytes = self._sent_bytes, 0
                enough = is_enough()
                if not (enough or sent):
                    self._changed.wait(_POLL_S)
            if sent:
                yield Sent(sent)
            if enough:
                return
            if not self._thread.is_alive() and self._failure is None:
                message = "the thread that sends shards has died"
                raise AssertionError(message)

    # From here on, in the thread.

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                shard = self._todo.get()
                if shard is not None:
                    self._send(shard)
                is_time = time.monotonic() - self._committed_s > _COMMIT_EVERY_S
                if shard is None or is_time or not self._fits():
                    self._commit()
        except MoeconvError as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _send(self, shard: ShardRecord) -> None:
        if holds(self._there, shard.file, shard.size, shard.sha256):
            self._land([shard])  # an earlier run sent it, and had no time to note that
            return
        path = self._root / shard.file
        if self._book is None:
            _check_digest(path, shard)  # what lay around for a while may have been damaged
        self._ready.append((shard, self._repository.send(shard.file, path, shard.sha256)))

    def _commit(self) -> None:
        shards = [shard for shard, _ in self._ready]
        if not shards:
            return
        operations = [operation for _, operation in self._ready]
        if self._book is not None:
            operations += [
                addition(f"{RECORDS}/{self._book.numbers[shard.file]}.json", encode(_sent(shard)))
                for shard in shards
            ]
        self._repository.keep(operations, f"Add {len(shards)} shards")
        self._repository.check_work(
            lambda tree: [s.file for s in shards if not holds(tree, s.file, s.size, s.sha256)]
        )
        self._ready.clear()
        self._committed_s = time.monotonic()
        self._land(shards)

    def _land(self, shards: Iterable[ShardRecord]) -> None:
        """Note that shards are on the Hub; only then may they be gone here."""
        for shard in shards:
            if self._book is not None:
                self._book.directory.add_record(self._book.numbers[shard.file], _sent(shard))
            if self._bound is not None:
                path = self._root / shard.file
                with writing(path):
                    path.unlink()
            with self._changed:
                self._staged_bytes -= shard.size
                self._sent_bytes += shard.size
                self._changed.notify_all()


def _check_digest(path: Path, shard: ShardRecord) -> None:
    found = sha256_of(path)
    if found != shard.sha256:
        message = f"`{path}` is damaged: expected SHA-256 {shard.sha256}, found {found}"
        raise VerifyError(message, hint="nothing was published; convert again, or copy it again")


def _sent(shard: ShardRecord) -> ShardRecord:
    return replace(shard, state=UPLOADED)
