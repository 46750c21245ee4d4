"""How do several streams of events go on at once, and stop as one?"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def abreast(streams: Iterable[Generator[T, None, None]], width: int) -> Generator[T, None, None]:
    """Yield what streams yield, `width` of them at a time, each in its own order.

    A stream is one step ahead of what was yielded, no more. It may go on in another thread at each
    step. Where one fails, or whoever asks stops asking, all that were begun are closed.
    """
    left = iter(streams)
    running: dict[Future[T | None], Generator[T, None, None]] = {}
    with ThreadPoolExecutor(width, thread_name_prefix="moeconv-shard") as pool:
        try:
            for stream in islice(left, width):
                running[pool.submit(next, stream, None)] = stream
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    stream = running.pop(future)
                    event = future.result()
                    following = next(left, None) if event is None else stream
                    if following is not None:
                        running[pool.submit(next, following, None)] = following
                    if event is not None:
                        yield event
        finally:
            # One that waits for what another holds gets it as that other is closed.
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    running.pop(future).close()
