"""XXH3-128 of rows of bytes: one by one, or in one call where they are many."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import xxhash

from moeconv.ranges.rows import are_many, row_addresses, row_by_row, row_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from moeconv.ranges.rows import Numbers, Tables


@functools.cache
def digest_loop() -> Callable[[Numbers, Numbers], list[str]] | None:
    """Return what digests many ranges in one call, where numba and `xxhash` allow it."""
    try:
        from moeconv.ranges.digestloop import digests_at, is_there
    except ImportError:
        return None
    return digests_at if is_there() else None


def xxh3_each(tables: Tables) -> list[str]:
    """Return the digest of each row, in their order, as hexadecimal digits."""
    loop = digest_loop() if are_many(tables) else None
    if loop is not None:
        return loop(row_addresses(tables), row_sizes(tables))
    return list(map(xxhash.xxh3_128_hexdigest, row_by_row(tables)))
