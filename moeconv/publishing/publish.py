"""How does a conversion get to the Hub? Shards ahead, then one commit that has all of it.

    adopt ─▶ convert, each record to `Uploads` ─▶ seal ─▶ finish

A conversion that is sealed has only `finish` left, which sends what is not there yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from moeconv.errors import OutputError, VerifyError
from moeconv.output.codec import decode, encode, parse_manifest
from moeconv.output.hub import Repository, addition, copy, removal
from moeconv.output.manifest import FactsEntry, FileEntry, Manifest
from moeconv.output.names import MANIFEST_NAME
from moeconv.output.records import UPLOADED, WRITTEN, KeptFacts, ShardRecord
from moeconv.output.tree import Held, holds
from moeconv.publishing.sent import Sent
from moeconv.publishing.uploads import RECORDS, Uploads

if TYPE_CHECKING:
    from moeconv.output.directory import OutputDirectory
    from moeconv.output.hub import Operation

CARD: Final = "README.md"
FACTS: Final = ".moeconv/facts.json"
"""Where the work branch has what was found in the scales, once for all machines."""

_SHARDS: Final = ("experts/", "restore/", "weights/")
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Published:
    """A model that is on the Hub.

    Attributes
    ----------
    name, revision
        The repository, and the commit or pull request that has the model.
    files, nbytes
        What the manifest says that it consists of.
    was_there
        It was there before this run.
    """

    name: str
    revision: str
    files: int
    nbytes: int
    was_there: bool


@dataclass(frozen=True, slots=True)
class Content:
    """What the repository is to hold: shards, and small files with their bytes."""

    shards: tuple[FileEntry, ...]
    small: Mapping[str, bytes]

    @classmethod
    def of(cls, root: Path, manifest: Manifest, card: bytes) -> Content:
        """Return what a sealed directory, and the card, come to."""
        shards = tuple(entry for entry in manifest.files if entry.path.startswith(_SHARDS))
        names = [entry.path for entry in manifest.files if entry not in shards]
        small = {name: (root / name).read_bytes() for name in (*names, MANIFEST_NAME)}
        return cls(shards, {**small, CARD: card})

    def lacking(self, tree: Mapping[str, Held]) -> list[str]:
        """Return what a tree has not, or has other bytes of."""
        small = (name for name, data in self.small.items() if not _is(tree.get(name), data))
        return [*(entry.path for entry in self.shards if not _has(tree, entry)), *small]


def adopt(directory: OutputDirectory, files: Sequence[str], repository: Repository) -> None:
    """Take over what earlier runs, here or elsewhere, brought to the work branch.

    Parameters
    ----------
    directory
        Whose records are brought up to date.
    files
        The shard of each job, in the order of the jobs.
    repository
        Where the work branch is.
    """
    there = repository.files(repository.work)
    for number, file in enumerate(files):
        record, name = directory.record(number, file), f"{RECORDS}/{number}.json"
        if record is None and name in there:
            theirs = decode(repository.read(name, repository.work), ShardRecord, name)
            if theirs.file == file and _has(there, _entry(theirs)):
                directory.add_record(number, theirs)
        elif record and record.state == UPLOADED and not _has(there, _entry(record)):
            directory.add_record(number, replace(record, state=WRITTEN))  # it went elsewhere


def known_facts(repository: Repository, plan_id: str) -> tuple[FactsEntry, ...] | None:
    """Return what another machine found in the scales of a plan, if it brought that along."""
    if FACTS not in repository.files(repository.work):
        return None
    kept = decode(repository.read(FACTS, repository.work), KeptFacts, FACTS)
    return kept.facts if kept.plan_id == plan_id else None


def share_facts(repository: Repository, kept: KeptFacts) -> None:
    """Bring what was found in the scales to the work branch, for machines that begin later."""
    if kept.facts and FACTS not in repository.files(repository.work):
        repository.keep([addition(FACTS, encode(kept))], "Add what the scales are like")


def along(
    events: Iterable[_T | ShardRecord], uploads: Uploads, count: int
) -> Iterator[_T | ShardRecord | Sent]:
    """Send each shard of a conversion as it becomes durable.

    The last of `count` is waited for, so that a directory is sealed when each of its shards is
    durable in its place, be it here or on the Hub. So is the last of a share: the machine that did
    it may be gone before another one joins the shares.
    """
    seen: set[str] = set()
    for event in events:
        yield event
        if isinstance(event, ShardRecord):
            yield from uploads.take(event)
            seen.add(event.file)
            if len(seen) == count:
                yield from uploads.drain()
    yield from uploads.drain()


def check_target(repository: Repository, tree: Mapping[str, Held]) -> None:
    """Refuse a repository whose weights somebody else put there.

    Raises
    ------
    OutputError
        An engine would find two models in it.
    """
    is_ours = MANIFEST_NAME in tree
    for path in tree:
        if path.endswith(_WEIGHTS) and not (is_ours and path.startswith(_SHARDS)):
            message = f"`{repository.name}` holds `{path}`, which moeconv did not put there"
            raise OutputError(message, hint="publish to a repository, or `--revision`, of its own")


def find_published(repository: Repository, tree: Mapping[str, Held], at: str) -> Manifest | None:
    """Return the manifest of a revision, if there is one that can be read."""
    if MANIFEST_NAME not in tree:
        return None
    try:
        return parse_manifest(repository.read(MANIFEST_NAME, at))
    except VerifyError:
        return None


def is_published(manifest: Manifest | None, tree: Mapping[str, Held], plan_id: str) -> bool:
    """Say whether a revision has all that a plan comes to."""
    if manifest is None or manifest.plan_id != plan_id:
        return False
    return all(_has(tree, e) for e in manifest.files if e.path.startswith(_SHARDS))


def finish(
    repository: Repository, root: Path, manifest: Manifest, card: bytes
) -> Iterator[Sent | Published]:
    """Make a sealed conversion appear on the Hub, whole; the last event says where.

    Raises
    ------
    OutputError
        A shard is neither here nor there, the target is somebody else's or has changed meanwhile,
        or the Hub refuses.
    VerifyError
        A shard is damaged, or the Hub has in the end not what the manifest says.
    """
    content = Content.of(root, manifest, card)
    size = len(content.shards) + len(content.small), sum(e.size for e in content.shards)
    parent = repository.target()
    target = repository.files(parent)
    check_target(repository, target)
    earlier = find_published(repository, target, parent)
    if is_published(earlier, target, manifest.plan_id):
        repository.drop_work()
        yield Published(repository.name, parent, *size, was_there=True)
        return
    yield from _stage(repository, root, content)
    stale = {entry.path for entry in earlier.files} if earlier else set()
    revision = repository.publish(
        lambda: _operations(repository, content, stale),
        f"Add {manifest.source.name} in the layout {manifest.layout.id}",
        parent,
    )
    lacking = content.lacking(repository.files(revision))
    if lacking:
        message = f"`{lacking[0]}` of `{repository.name}` is not as `{MANIFEST_NAME}` says"
        raise VerifyError(message, hint="did somebody else write there meanwhile? publish again")
    repository.drop_work()
    yield Published(repository.name, revision, *size, was_there=False)


def unsent(content: Content, there: Mapping[str, Held]) -> list[FileEntry]:
    """Return the shards that are not in a tree."""
    return [entry for entry in content.shards if not _has(there, entry)]


def _stage(repository: Repository, root: Path, content: Content) -> Iterator[Sent]:
    """Bring all of it to the work branch, and look at what is there, before anyone sees it."""
    with Uploads(repository, root, {}) as uploads:
        for entry in unsent(content, repository.files(repository.work)):
            path = root / entry.path
            if not path.is_file() or path.stat().st_size != entry.size:
                message = f"`{entry.path}` is neither in `{root}` nor on the Hub"
                hint = "convert again, with `--overwrite`; was it sent to another repository?"
                raise OutputError(message, hint=hint)
            yield from uploads.take(_record(entry))
        yield from uploads.drain()
    repository.keep([addition(*item) for item in content.small.items()], "Add small files")
    repository.check_work(content.lacking)


def _operations(repository: Repository, content: Content, stale: set[str]) -> list[Operation]:
    """Return what turns the target as it is now into the model."""
    tree = repository.files(repository.destination.revision)
    work = repository.head(repository.work) or repository.work
    kept = {*content.small, *(entry.path for entry in content.shards)}
    return [
        *(copy(entry.path, work) for entry in content.shards if not _has(tree, entry)),
        *(addition(*item) for item in content.small.items()),
        *(removal(path) for path in sorted(stale - kept) if path in tree),
    ]


def _has(tree: Mapping[str, Held], entry: FileEntry) -> bool:
    return holds(tree, entry.path, entry.size, entry.sha256)


def _is(held: Held | None, data: bytes) -> bool:
    return held is not None and held.is_content(data)


def _entry(record: ShardRecord) -> FileEntry:
    return FileEntry(record.file, record.size, record.sha256)


def _record(entry: FileEntry) -> ShardRecord:
    return ShardRecord(entry.path, entry.size, entry.sha256, WRITTEN, (), ())
