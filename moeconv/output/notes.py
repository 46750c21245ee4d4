"""What do processes of one plan tell each other, beside the jobs that are done?"""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

from moeconv.errors import OutputError, VerifyError
from moeconv.output.codec import MOST_BYTES, check_names, decode, encode, read_note
from moeconv.output.durable import write_file
from moeconv.output.manifest import FactsEntry, Manifest, RunEntry
from moeconv.output.names import MANIFEST_NAME, WORK_FOLDER
from moeconv.output.records import Asked, KeptFacts
from moeconv.paths import read_regular

_ASKED: Final = "asked.json"
_FACTS: Final = "facts.json"
_DRAFT: Final = "draft.json"

_T = TypeVar("_T")


class Notes:
    """Notes in the work folder of an output directory.

    Parameters
    ----------
    root
        The output directory.
    plan_id
        Whose notes count: another plan's are none.
    """

    def __init__(self, root: Path, plan_id: str) -> None:
        self._root, self._work, self._plan_id = root, root / WORK_FOLDER, plan_id

    def keep_facts(self, facts: tuple[FactsEntry, ...]) -> None:
        """Note what a survey found, for the next process of this plan."""
        self._keep(_FACTS, encode(KeptFacts(self._plan_id, facts)))

    @staticmethod
    def facts_of(root: Path, plan_id: str) -> tuple[FactsEntry, ...] | None:
        """Return what a survey found in an earlier run of a plan, if it is there."""
        kept = read_note(root / WORK_FOLDER / _FACTS, KeptFacts)
        return kept.facts if kept and kept.plan_id == plan_id else None

    def keep_asked(self, asked: Asked) -> None:
        """Note what a run is made from, if it is the first here."""
        if not (self._work / _ASKED).exists():
            self._keep(_ASKED, encode(asked))

    @staticmethod
    def asked_of(root: Path) -> Asked | None:
        """Return what an unfinished run is made from, where that is a repository of the Hub."""
        return read_note(root / WORK_FOLDER / _ASKED, Asked)

    def keep_draft(self, draft: Manifest) -> None:
        """Note what the manifest will say but for digests, for whoever seals."""
        self._keep(_DRAFT, encode(draft))

    def draft(self) -> Manifest:
        """Return that note.

        Raises
        ------
        VerifyError
            It is not there or broken.
        """
        draft = self._noted(_DRAFT, Manifest)
        check_names(draft)
        return draft

    def add_run(self, name: str, run: RunEntry) -> None:
        """Note how a share of the work went."""
        self._keep(f"runs/{name}.json", encode(run))

    def runs(self) -> list[RunEntry]:
        """Return how the shares went that were noted."""
        paths = sorted((self._work / "runs").glob("*.json"))
        return [self._noted(f"runs/{path.name}", RunEntry) for path in paths]

    def _noted(self, name: str, kind: type[_T]) -> _T:
        path, what = self._work / name, f"{WORK_FOLDER}/{name}"
        try:
            data = read_regular(path, MOST_BYTES)
        except OSError as error:
            message = f"`{what}` cannot be read: {error.strerror}"
            raise VerifyError(message) from error
        return decode(data, kind, what)

    def _keep(self, name: str, data: bytes) -> None:
        """Write what nobody needs any more where another process has sealed meanwhile."""
        try:
            write_file(self._work / name, (data,), self._work / "tmp")
        except OutputError:
            if not (self._root / MANIFEST_NAME).exists():
                raise
