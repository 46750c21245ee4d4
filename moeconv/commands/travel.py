"""What does a dry run say of the network, and of the repository that the result would go to?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from moeconv import report
from moeconv.conversion.survey import surveyed_bytes

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.planning.plan import Plan
    from moeconv.publishing.outlook import Outlook

_RATE: Final = 10**8
"""Bytes a second of a network to go by, since nothing is fetched to find out."""


@dataclass(frozen=True, slots=True)
class Travel:
    """What comes and goes over the network: bytes down, of them scales read before, bytes up."""

    down: int
    scales: int
    up: int
    is_kept: bool

    @classmethod
    def of(
        cls, plan: Plan, checkpoint: Checkpoint, *, is_kept: bool, outlook: Outlook | None
    ) -> Self:
        """Work it out; where the source is kept, scales are read here."""
        is_remote = checkpoint.origin.is_remote
        every = sum(ref.spec.nbytes for ref in checkpoint.tensors.values())
        scales = surveyed_bytes(plan) * (is_remote and not is_kept)
        return cls(every * is_remote + scales, scales, plan.nbytes * bool(outlook), is_kept)


def network_rows(travel: Travel) -> Iterator[tuple[str, str]]:
    """Yield what comes and goes over the network, and how long that takes at a rate to go by."""
    down, up = travel.down, travel.up
    if down:
        kept = "stay in the library's cache" if travel.is_kept else "are not kept here"
        yield "network", f"{report.size(down)} come over it, and {kept}"
        if scales := travel.scales:
            yield (
                "",
                f"of these {report.size(scales)} first, of scales, which were not read for this",
            )
    if up:
        yield "network" if not down else "", f"{report.size(up)} go to the Hub"
    if down or up:
        seconds = max(down, up) / _RATE
        yield "", f"{report.duration(seconds)} at {report.size(_RATE)}/s each way"


def push_facts(outlook: Outlook, plan_id: str) -> dict[str, object]:
    """Return what is on the Hub where a plan is to be published, for a machine."""
    return {
        "name": outlook.name,
        "revision": outlook.revision,
        "is_there": outlook.is_there,
        "at": outlook.at,
        "was_there": outlook.has(plan_id),
    }


def push_rows(outlook: Outlook, plan_id: str) -> Iterator[tuple[str, str]]:
    """Yield the same for a person."""
    where = f"`{outlook.revision}` of `{outlook.name}`"
    if not outlook.is_there:
        yield "publishes", f"on {where}, a new repository"
        return
    at = f"at {outlook.at} now" if outlook.at else "a new branch"
    yield "publishes", f"on {where}, {at}; the token may write there"
    if outlook.has(plan_id):
        yield "there", "all of it: nothing is left to do"
    elif outlook.shards_sent:
        yield "there", f"{report.count(outlook.shards_sent, 'shard')}, from earlier runs"
    elif outlook.earlier:
        yield "replaces", f"{outlook.earlier.source.name} in the layout {outlook.earlier.layout.id}"
