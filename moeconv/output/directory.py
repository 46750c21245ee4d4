"""The output directory while it grows: who may write there, what is done, when it is whole.

    OUT/.moeconv/plan.json      the plan's id and what it is made of
    OUT/.moeconv/draft.json     the manifest without what only written shards tell
    OUT/.moeconv/runs/          how each share of the work went, where shares were given out
    OUT/.moeconv/asked.json     the revision of a repository that was asked for, and its commit
    OUT/.moeconv/facts.json     what the survey of the scales found, where there is one
    OUT/.moeconv/records/N.json what job N wrote; its shard is durable before this is
    OUT/.moeconv/locks/N        held while job N runs; the system frees it with its process
    OUT/.moeconv/tmp/           shards that are not whole yet

Processes with the same plan id join in. `seal` writes the rest of the directory, then the
manifest, then removes `.moeconv/`: without a manifest there is no model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from moeconv.errors import OutputError, SourceError
from moeconv.output.codec import (
    encode,
    encode_sealed,
    read_manifest,
    read_note,
)
from moeconv.output.durable import write_file, writing
from moeconv.output.locks import Locks
from moeconv.output.manifest import FileEntry, Manifest
from moeconv.output.names import MANIFEST_NAME, WORK_FOLDER, kept_name
from moeconv.output.notes import Notes
from moeconv.output.ownership import (
    SEE_TO,
    check_begun,
    check_directory,
    check_ours,
    check_plan,
    noted_plan,
    replaces,
)
from moeconv.output.place import check_place
from moeconv.output.records import UPLOADED, KeptRecord, ShardRecord
from moeconv.output.removal import remove
from moeconv.output.shard import is_of_plan

if TYPE_CHECKING:
    from collections.abc import Sequence


class OutputDirectory:
    """An output directory that belongs to one plan.

    Parameters
    ----------
    root
        The directory; made if it is not there.
    plan_id, identity
        The plan's digest, and what it is a digest of.
    overwrite
        Replace what is there, if it is moeconv's; an unfinished run of this very plan is joined.

    Attributes
    ----------
    notes
        What processes of the plan tell each other.
    is_published
        A shard whose record says that it is on the Hub need not be here.

    Raises
    ------
    OutputError
        It is not empty and not moeconv's, or holds another plan.
    """

    def __init__(
        self, root: Path, plan_id: str, identity: Mapping[str, str], *, overwrite: bool = False
    ) -> None:
        check_place(root)
        self.root = root
        self.is_published = False
        self._plan_id = plan_id
        self._work, self._locks = root / WORK_FOLDER, Locks(root)
        self.notes = Notes(root, plan_id)
        if replaces(root, plan_id, overwrite=overwrite):
            remove(root, identity.get("side files", "").splitlines())
        check_plan(root, plan_id, identity)
        self.finished = self.is_sealed() or not self._joins(identity)
        if self.finished:
            self.clean()  # what a crash between the manifest and the tidying left

    @classmethod
    def begun(cls, root: Path) -> Self:
        """Return a directory that a conversion has begun, by the plan that it holds.

        Raises
        ------
        OutputError
            None has begun there, or its notes are broken.
        """
        if (root / MANIFEST_NAME).exists():
            manifest = read_manifest(root)
            return cls(root, manifest.plan_id, manifest.plan)
        check_directory(root)
        plan = noted_plan(root)
        if plan is None:
            message = f"`{root}` holds no conversion that has begun: there is no `{WORK_FOLDER}/`"
            hint = "give the directory that `--out` named, with its hidden files"
            raise OutputError(message, hint=hint)
        return cls(root, plan.pop("id", ""), plan)

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Show that this run lives, between two jobs as well, so that `--overwrite` keeps off."""
        with self._locks.take(f"run.{os.getpid()}.{id(self)}") or contextlib.nullcontext():
            yield

    def temporary(self, number: int) -> Path:
        """Return where the shard of a job grows."""
        return self._work / "tmp" / f"{number}.safetensors"

    @contextlib.contextmanager
    def claim(self, number: int) -> Iterator[bool]:
        """Hold a job while the block runs; false if another process holds it."""
        lock = self._locks.take(str(number), wait=False)
        if lock is None:
            yield False  # another process holds it, or has just tidied up after sealing
            return
        with lock:
            self._check_still_ours()
            yield True

    def record(self, number: int, file: str) -> ShardRecord | None:
        """Return what a finished job wrote, if its shard is still there, or on the Hub."""
        kept = read_note(self._work / "records" / f"{number}.json", KeptRecord)
        if kept is None or kept.plan_id != self._plan_id or kept.record.file != file:
            return None  # another plan's, where directories were copied over each other
        record = kept.record
        if self.is_published and record.state == UPLOADED:
            return record
        path = self.root / file
        is_here = path.is_file() and path.stat().st_size == record.size
        return record if is_here and is_of_plan(path, self._plan_id) else None

    def drop_damaged(self, number: int, file: str) -> bool:
        """Forget a finished job whose shard has other bytes than it wrote; say whether it had."""
        with self.claim(number) as is_mine:
            record = self.record(number, file) if is_mine else None
            if record is None or self.file_entry(file).sha256 == record.sha256:
                return False
            with writing(self._work):
                (self._work / "records" / f"{number}.json").unlink()
        return True

    def add_record(self, number: int, record: ShardRecord) -> None:
        """Note that a job is done; its shard must be durable by now."""
        kept = KeptRecord(self._plan_id, record)
        self._write(self._work / "records" / f"{number}.json", encode(kept))

    @contextlib.contextmanager
    def sealing(self) -> Iterator[bool]:
        """Hold the right to seal; false if another process has sealed meanwhile."""
        lock = self._locks.take("seal")
        if lock is None:
            yield False  # another process has just tidied up
            return
        with lock:
            yield not self.is_sealed()

    def seal(self, manifest: Manifest) -> None:
        """Write the manifest last, then drop the work folder."""
        self._write(self.root / MANIFEST_NAME, encode_sealed(manifest))

    def reseal(self, manifest: Manifest) -> None:
        """Write the manifest of a sealed directory anew."""
        with writing(self._work):
            self._work.mkdir(exist_ok=True)
        self.seal(manifest)
        self.clean()

    def clean(self) -> None:
        """Remove the work folder of a sealed directory."""
        shutil.rmtree(self._work, ignore_errors=True)

    def manifest(self) -> Manifest:
        """Read the manifest of a sealed directory.

        Raises
        ------
        OutputError
            It cannot be read any more.
        """
        try:
            return read_manifest(self.root)
        except SourceError as error:
            raise OutputError(str(error), hint=SEE_TO) from error

    def file_entry(self, name: str) -> FileEntry:
        """Return size and SHA-256 of a file of the directory."""
        with writing(self.root / name), (self.root / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileEntry(name, file.tell(), digest)

    def is_sealed(self) -> bool:
        """Return whether the manifest is there."""
        return (self.root / MANIFEST_NAME).exists()

    def copy_side_files(
        self, chunks: Callable[[str], Iterable[bytes]], names: Sequence[str]
    ) -> None:
        """Keep files as `chunks` yields their bytes, each whole or not at all."""
        for name in names:
            path = self.root / kept_name(name)
            try:
                write_file(path, chunks(name), self._work / "tmp")
            except OutputError:
                if not self.is_sealed():  # another process has sealed, with these files in place
                    raise

    def _write(self, path: Path, data: bytes) -> None:
        write_file(path, (data,), self._work / "tmp")

    def _check_still_ours(self) -> None:
        """Refuse to go on where somebody emptied the directory, or gave it another plan."""
        plan = noted_plan(self.root) or {}
        if plan.get("id") == self._plan_id or self.is_sealed():
            return
        message = f"`{self.root}` was emptied, unmounted or given another plan while this one ran"
        raise OutputError(message, hint=f"{SEE_TO}, or give another `--out`")

    def _joins(self, identity: Mapping[str, str]) -> bool:
        """Begin, or go on; false if another process of this plan has sealed meanwhile."""
        try:
            check_ours(self.root)
            with writing(self.root):
                self._work.mkdir(parents=True, exist_ok=True)
            with self._locks.take("plan") or contextlib.nullcontext():
                self._join(identity)
        except OutputError:  # the folder may have been tidied up under it
            if not self.is_sealed():
                raise
        check_plan(self.root, self._plan_id, identity)
        return not self.is_sealed()

    def _join(self, identity: Mapping[str, str]) -> None:
        path = self._work / "plan.json"
        mine = {"id": self._plan_id, **identity}
        if not path.exists():
            self._write(path, encode(mine))
            return
        check_begun(self.root, self._plan_id, identity)
