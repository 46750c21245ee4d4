"""What is done beside converting? Nothing, or what `--push` asks for, with the Hub's library."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from moeconv.commands.space import check_bound

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.commands.options import Options
    from moeconv.commands.push import Push
    from moeconv.output.directory import OutputDirectory
    from moeconv.output.manifest import FactsEntry, Manifest
    from moeconv.planning.plan import Plan

_T = TypeVar("_T")


class Keep:
    """What a conversion that stays here has to do beside converting: nothing."""

    def is_there(self, checkpoint: Checkpoint) -> bool:
        """Nothing is anywhere else."""
        del checkpoint
        return False

    def known_facts(self) -> tuple[FactsEntry, ...] | None:
        """Nobody has looked at the scales anywhere else."""
        return None

    def adopt(self, directory: OutputDirectory, plan: Plan) -> None:
        """Nothing was done anywhere else."""

    def along(self, directory: OutputDirectory, events: Iterable[_T]) -> Iterable[_T]:
        """Return the events of the conversion."""
        del directory
        return events

    def finish(self, manifest: Manifest) -> None:
        """Leave it where it is."""


Sink: TypeAlias = "Keep | Push"


def sink_for(options: Options, plan: Plan, out: Path) -> Sink:
    """Return what is to be done beside converting.

    Raises
    ------
    OutputError
        The disk may not be so full as it would be.
    """
    if options.destination is not None:
        from moeconv.commands.push import Push

        return Push(options, options.destination, plan, out)
    check_bound(plan, options.max_disk_bytes, is_pushed=False)
    return Keep()
