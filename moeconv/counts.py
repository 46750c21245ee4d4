"""Is what a program gave for a count one? Asked before anything is made of it."""

from __future__ import annotations

import operator
from typing import Final, SupportsIndex

from moeconv.errors import UnsupportedError

MOST_WORKERS: Final = 1 << 10
"""More threads than any machine has a use for: above it, it is a slip."""


def check_count(
    name: str, value: object, least: int | None = None, most: int | None = None
) -> None:
    """Refuse what is no whole number, or none of a range; `True` is no number here.

    Raises
    ------
    UnsupportedError
        It is so.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, SupportsIndex)
        or (least is not None and operator.index(value) < least)
        or (most is not None and operator.index(value) > most)
    ):
        bounds = (("at least", least), ("at most", most))
        wanted = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
        message = f"`{name}` is {value!r}, expected a whole number"
        message += f" of {wanted}" if wanted else ""
        raise UnsupportedError(message)
