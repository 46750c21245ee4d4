"""Many reads in one call, compiled. Imported where they are many: numba takes its time.

A checkpoint of FP4 experts has thousands of small tensors a gigabyte. A thread that reads one gives
the interpreter's lock up, and waits for it again behind all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from numba import types

from moeconv.compiling import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from moeconv.ranges.rows import Numbers

    Fill: TypeAlias = Callable[[int, Numbers, Numbers, Numbers], int]

pread: Callable[[int, int, int, int], int] = types.ExternalFunction(
    "pread", types.intp(types.int32, types.intp, types.uintp, types.int64)
)


@compiled
def fill(fd: int, begins: Numbers, addresses: Numbers, sizes: Numbers) -> int:
    """Fill ranges of memory from offsets of a file; return how many before one that fails."""
    for i in range(len(sizes)):
        done = 0
        while done < sizes[i]:
            got = pread(fd, addresses[i] + done, sizes[i] - done, begins[i] + done)
            if got <= 0:
                return i
            done += got
    return len(sizes)
