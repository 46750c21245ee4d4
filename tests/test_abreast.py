"""Streams abreast: each keeps its order, none runs ahead, all end together."""

from __future__ import annotations

import threading
from collections.abc import Generator
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.conversion.abreast import abreast


def numbered(stream: int, count: int) -> Generator[tuple[int, int], None, None]:
    yield from ((stream, i) for i in range(count))


@given(counts=st.lists(st.integers(0, 5), max_size=6), width=st.integers(1, 4))
def test_everything_comes_once_and_in_the_order_of_its_stream(counts, width):
    found = list(abreast((numbered(i, n) for i, n in enumerate(counts)), width))
    assert sorted(found) == [(i, at) for i, n in enumerate(counts) for at in range(n)]
    for i in range(len(counts)):
        assert [at for stream, at in found if stream == i] == list(range(counts[i]))


def test_so_many_are_begun_at_a_time():
    begun: list[int] = []

    def stream(number: int) -> Generator[int, None, None]:
        begun.append(number)
        yield from range(3)

    events = abreast((stream(i) for i in range(5)), 2)
    for _ in range(3):
        next(events)
    assert sorted(begun) == [0, 1]
    events.close()


def test_one_that_waits_for_another_is_closed_with_it():
    """As a shard waits for a slot that another shard holds."""
    slots: SimpleQueue[int] = SimpleQueue()
    slots.put(0)
    has_slot, closed = threading.Event(), []

    def stream(number: int) -> Generator[int, None, None]:
        slot = slots.get()
        try:
            has_slot.set()
            while True:
                yield number
        finally:
            closed.append(number)
            slots.put(slot)

    events = abreast([stream(0), stream(1)], 2)
    next(events)
    assert has_slot.is_set()
    events.close()
    assert sorted(closed) == [0, 1]
    assert slots.get_nowait() == 0


def test_a_failure_ends_them_all():
    closed = []

    def endless() -> Generator[int, None, None]:
        try:
            while True:
                yield 0
        finally:
            closed.append(True)

    def failing() -> Generator[int, None, None]:
        yield 1
        message = "no more"
        raise OSError(message)

    with pytest.raises(OSError, match="no more"):
        list(abreast([endless(), failing()], 2))
    assert closed == [True]
