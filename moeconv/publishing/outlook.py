"""What is on the Hub before anything is sent? Nothing is made there to find out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeconv.publishing.publish import check_target, find_published, is_published
from moeconv.publishing.uploads import RECORDS

if TYPE_CHECKING:
    from moeconv.output.hub import Repository
    from moeconv.output.manifest import Manifest
    from moeconv.output.tree import Held


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a repository holds.

    Attributes
    ----------
    name, revision
        The repository, and the branch that the model is to appear on.
    is_there
        Whether there is one; else it is made.
    at
        The commit of the target revision; `None` where that is still to be made.
    target, work
        The files of the target revision, and of the work branch.
    earlier
        The manifest of moeconv's model on the target revision, if one is there.
    """

    name: str
    revision: str
    is_there: bool
    at: str | None
    target: Mapping[str, Held]
    work: Mapping[str, Held]
    earlier: Manifest | None

    @property
    def shards_sent(self) -> int:
        """How many shards earlier runs brought to the work branch."""
        return sum(path.startswith(f"{RECORDS}/") for path in self.work)

    def has(self, plan_id: str) -> bool:
        """Say whether all that a plan comes to is published."""
        return is_published(self.earlier, self.target, plan_id)


def look(repository: Repository, *, is_there: bool) -> Outlook:
    """Look at the target and at the work branch of a repository that is there, or is not.

    Raises
    ------
    OutputError
        Somebody else's weights are there, or the Hub refuses.
    """
    wanted = repository.destination
    at = repository.head(wanted.revision) if is_there else None
    target = repository.files(at)
    check_target(repository, target)
    earlier = find_published(repository, target, at) if at else None
    work = repository.files(repository.work if is_there else None)
    return Outlook(wanted.name, wanted.revision, is_there, at, target, work, earlier)
