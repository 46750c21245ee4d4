"""Which part of the work is this process's, beside others of the same plan?"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moeconv.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Share:
    """Part `index`, from 0, of `count` parts of the jobs.

    Attributes
    ----------
    only
        Leave the other parts to others, who may not see this directory; do not seal.
    """

    index: int = 0
    count: int = 1
    only: bool = False

    @property
    def leads(self) -> bool:
        """Whether this process speaks for all: progress, summary and JSON come from one."""
        return self.only or self.index == 0

    @property
    def label(self) -> str:
        """Its number as people count, as `2/4`."""
        return f"{self.index + 1}/{self.count}"

    def jobs(self, count: int) -> list[int]:
        """Return the numbers of `count` jobs to do, its own part first."""
        own = range(count * self.index // self.count, count * (self.index + 1) // self.count)
        return [*own] if self.only else [*range(own.start, count), *range(own.start)]


WHOLE = Share()

_MOST_SHARES: Final = 999_999


def parse_part(text: str) -> tuple[int, int]:
    """Read `2/4`: which part, from 1 on, of how many; 0 of 0 where it does not say so."""
    match = re.fullmatch(r"(\d{1,18})/(\d{1,18})", text.strip(), re.ASCII)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def parse_share(text: str) -> Share:
    """Read `2/4`, the second of four.

    Raises
    ------
    ValueError
        It is no part of a whole.
    """
    index, count = parse_part(text)
    if count > _MOST_SHARES:
        message = f"{text!r} is of more than {_MOST_SHARES} shares"
        raise ValueError(message)
    if not 1 <= index <= count:
        message = f"{text!r} is no share; write it as 1/4, 2/4, 3/4 or 4/4"
        raise ValueError(message)
    return Share(index - 1, count, only=True)


def launched(env: Mapping[str, str] = os.environ) -> Share:
    """Return the share by the names that `torchrun` sets, or all of the work.

    Raises
    ------
    UnsupportedError
        The names do not make a rank.
    """
    rank, size = env.get("RANK", "0"), env.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        message = f"`RANK`={rank!r} of `WORLD_SIZE`={size!r} is no rank"
        raise UnsupportedError(message, hint="unset both, or let torchrun set them")
    return Share(int(rank), int(size))


def own_gpu(env: Mapping[str, str] = os.environ) -> str:
    """Return the GPU of this process: one each under `torchrun`, else the first."""
    local = env.get("LOCAL_RANK", "")
    return f"cuda:{local if local.isdecimal() else 0}"


def ranks_here(env: Mapping[str, str] = os.environ) -> int:
    """Return how many processes of `torchrun` this machine's cores are for; 1 without it."""
    count = env.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count)) if count.isdecimal() else 1
