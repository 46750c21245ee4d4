"""What is done for `--push` and `moeconv push`, and what the person sees of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from moeconv import report
from moeconv.checkpoint.index import read_config
from moeconv.commands.space import check_bound
from moeconv.commands.travel import push_facts, push_rows
from moeconv.inspection.converted import loaders
from moeconv.output.alone import alone
from moeconv.output.card import Serving, carried, write_card
from moeconv.output.codec import read_manifest
from moeconv.output.hub import Destination, Repository
from moeconv.output.manifest import Manifest
from moeconv.output.names import SOURCE_CARD
from moeconv.output.records import KeptFacts, ShardRecord
from moeconv.planning.plan import facts_entries
from moeconv.publishing.outlook import look
from moeconv.publishing.publish import (
    Content,
    Published,
    adopt,
    along,
    finish,
    known_facts,
    share_facts,
    unsent,
)
from moeconv.publishing.sent import Sent
from moeconv.publishing.uploads import Book, Bound, Uploads
from moeconv.shell import typed

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.commands.options import Options
    from moeconv.output.directory import OutputDirectory
    from moeconv.output.manifest import FactsEntry
    from moeconv.planning.plan import Plan

_T = TypeVar("_T")


class Push:
    """What a conversion does beside converting that goes to the Hub while it is made.

    Parameters
    ----------
    options
        Where to, and how much of the disk it may take.
    destination
        The first of that.
    plan
        What is made.
    out
        Where it is made.

    Raises
    ------
    OutputError
        One shard is larger than the disk may be full.
    """

    def __init__(self, options: Options, destination: Destination, plan: Plan, out: Path) -> None:
        self._repository = Repository(destination, plan.id)
        self._plan, self._out = plan, out
        largest, most = (
            check_bound(plan, options.max_disk_bytes, is_pushed=True),
            options.max_disk_bytes,
        )
        self._bound = None if most is None else Bound(most, largest)
        self._as_json = options.as_json

    def is_there(self, checkpoint: Checkpoint) -> bool:
        """Refuse what can be refused before the work; say whether the work is done.

        Raises
        ------
        OutputError
            The Hub does not let us write there, or somebody else's model is there.
        SourceError
            The metadata of the source's card cannot be read.
        """
        has_card = "README.md" in checkpoint.side_files
        card = b"".join(checkpoint.origin.chunks("README.md")) if has_card else b""
        carried(card.decode("utf-8", "replace"))
        repository = self._repository
        repository.open()
        outlook = look(repository, is_there=True)
        manifest, target = outlook.earlier, outlook.at
        if not (target and manifest and outlook.has(self._plan.id)):
            return False
        repository.drop_work()
        size = sum(entry.size for entry in manifest.files)
        published = Published(repository.name, target, len(manifest.files), size, was_there=True)
        _show(published, as_json=self._as_json)
        return True

    def known_facts(self) -> tuple[FactsEntry, ...] | None:
        """Return what another machine found in the scales, if one did."""
        return known_facts(self._repository, self._plan.id)

    def adopt(self, directory: OutputDirectory, plan: Plan) -> None:
        """Take over what earlier runs, here or elsewhere, brought to the Hub.

        The plan is the one given before, with all its shards by now.
        """
        self._plan = plan
        directory.is_published = True
        share_facts(self._repository, KeptFacts(plan.id, facts_entries(plan.facts or {})))
        adopt(directory, [job.file for job in self._plan.jobs], self._repository)

    def along(
        self, directory: OutputDirectory, events: Iterable[_T | ShardRecord]
    ) -> Iterator[_T | ShardRecord | Sent]:
        """Yield the events of a conversion, and send its shards meanwhile."""
        repository, out = self._repository, self._out
        files = [job.file for job in self._plan.jobs]
        book = Book(directory, {file: number for number, file in enumerate(files)})
        there = repository.files(repository.work)
        with alone(out), Uploads(repository, out, there, book, self._bound) as uploads:
            for number, file in enumerate(files):  # an earlier run's, before there are more
                record = directory.record(number, file)
                if record is not None:
                    yield from uploads.take(record)
            yield from along(events, uploads, len(files))

    def finish(self, manifest: Manifest) -> None:
        """Make the sealed conversion appear."""
        with alone(self._out):
            _show(_finish(self._repository, self._out, manifest), as_json=self._as_json)


def run_push(root: Path, destination: Destination, *, dry_run: bool, as_json: bool) -> None:
    """Publish a finished conversion, or say what that would send."""
    manifest = read_manifest(root)
    repository = Repository(destination, manifest.plan_id)
    content = Content.of(root, manifest, _card(destination.name, root, manifest))
    if dry_run:
        _preview(repository, content, manifest.plan_id, as_json=as_json)
        return
    repository.open()
    with alone(root):
        _show(_finish(repository, root, manifest), as_json=as_json)


def _show(published: Published, *, as_json: bool) -> None:
    """Say where a model is."""
    if as_json:
        report.emit({"event": "published", **asdict(published)})
        return
    done = "is already on the Hub" if published.was_there else "is on the Hub"
    report.good(f"`{published.name}` {done}")
    report.table(
        "",
        (
            ("revision", published.revision),
            ("files", f"{published.files}, {report.size(published.nbytes)}"),
        ),
        commands=[("next", f"moeconv verify {typed(f'{published.name}@{published.revision}')}")],
    )


def _finish(repository: Repository, root: Path, manifest: Manifest) -> Published:
    card = _card(repository.name, root, manifest)
    with report.progress() as bar:
        total = sum(entry.size for entry in manifest.files)
        task = bar.add_task("publishing", total=total)
        for event in finish(repository, root, manifest, card):
            if isinstance(event, Published):
                return event
            bar.advance(task, event.nbytes)
    message = "publishing ended without a result"
    raise AssertionError(message)


def _preview(repository: Repository, content: Content, plan_id: str, *, as_json: bool) -> None:
    """Say what would be sent, and what is there already; nothing is sent."""
    outlook = look(repository, is_there=repository.check())
    left = unsent(content, {**outlook.target, **outlook.work})
    facts = {
        **push_facts(outlook, plan_id),
        "files": len(content.shards) + len(content.small),
        "shards_there": len(content.shards) - len(left),
        "shards_to_send": len(left),
        "bytes_to_send": sum(entry.size for entry in left),
        "replaces": sorted(path for path in content.small if path in outlook.target),
    }
    if as_json:
        report.emit({"event": "push plan", **facts})
        return
    report.table(
        f"plan for {repository.name}",
        (
            *push_rows(outlook, plan_id),
            (
                "to send",
                f"{report.count(len(left), 'shard')}, {report.size(sum(e.size for e in left))}",
            ),
            ("already there", report.count(len(content.shards) - len(left), "shard")),
            ("small files", ", ".join(sorted(content.small))),
        ),
        to_stdout=True,
    )
    report.note("nothing was sent; without `--dry-run` the same command publishes")


def _card(name: str, root: Path, manifest: Manifest) -> bytes:
    path = root / SOURCE_CARD
    source_card = path.read_text("utf-8", "replace") if path.is_file() else ""
    serving = [
        Serving(sight.engine, sight.versions, sight.start)
        for sight in loaders(name, manifest, read_config(root))
        if sight.start
    ]
    return write_card(name, manifest, source_card, serving)
