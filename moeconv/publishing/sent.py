"""What is told of shards on their way? Without the library that brings them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sent:
    """So many bytes of shards are on the Hub now."""

    nbytes: int
