"""Are all shares done, and is the directory a model then?"""

from __future__ import annotations

from pathlib import Path

from moeconv.errors import OutputError
from moeconv.output.completing import complete, together
from moeconv.output.directory import OutputDirectory
from moeconv.output.manifest import Manifest
from moeconv.output.names import kept_name
from moeconv.output.records import ShardRecord
from moeconv.paths import is_below

_SHOWN = 5


def seal(out: Path) -> Manifest:
    """Make a model of a directory in which every share of a conversion was done.

    Neither the source nor the plan is needed: the shares left a draft of the manifest. Shares that
    were done on other machines are joined by copying their directories over each other first,
    hidden files too.

    Raises
    ------
    OutputError
        No conversion has begun there, or shards are missing; it says which.
    """
    directory = OutputDirectory.begun(out)
    if directory.finished:
        return directory.manifest()
    draft = directory.notes.draft()
    found: list[ShardRecord] = []
    missing: list[str] = []
    for number, entry in enumerate(draft.files):
        record = directory.record(number, entry.path)
        if record is None:
            missing.append(f"`{entry.path}` (shard {number + 1})")
        else:
            found.append(record)
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (", …" if len(missing) > _SHOWN else "")
        message = f"`{out}` lacks {len(missing)} of {len(draft.files)} shards: {shown}"
        hint = "the command that converts does what is missing, and seals"
        raise OutputError(message, hint=hint)
    with directory.present(), directory.sealing() as is_mine:
        if is_mine:
            names = [kept_name(name) for name in draft.plan.get("side files", "").splitlines()]
            absent = [it for it in names if not (is_below(it) and (out / it).is_file())]
            if absent:
                message = f"`{out}` lacks `{absent[0]}`, a small file of the checkpoint"
                raise OutputError(message, hint="copy it there from the checkpoint")
            side = [directory.file_entry(name) for name in names]
            directory.seal(complete(draft, found, side, together(directory.notes.runs())))
    directory.clean()
    return directory.manifest()
