"""Is this the checkpoint that was converted? By its files: weights by their headers, others whole.

Tensors alone do not say so: the config, the tokenizer and the code decide what they mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moeconv.errors import VerifyError
from moeconv.output.names import kept_name

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint, SourceFile
    from moeconv.output.manifest import Manifest, SourceFileEntry


def check_source_files(manifest: Manifest, checkpoint: Checkpoint) -> None:
    """Compare the files of a checkpoint with what a manifest says of its source.

    Raises
    ------
    SourceError
        A file cannot be read.
    VerifyError
        A file is missing, is another one, or is there only now.
    """
    problems = [*_odd_weights(manifest, checkpoint), *_odd_side_files(manifest, checkpoint)]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        message = f"`{checkpoint.origin.where}` is not what was converted: {problems[0]}{more}"
        at = f"@{manifest.source.revision}" if manifest.source.revision else ""
        raise VerifyError(message, hint=f"it was made from `{manifest.source.name}{at}`")


def _odd_weights(manifest: Manifest, checkpoint: Checkpoint) -> Iterator[str]:
    before = {file.name: file for file in manifest.source.files}
    now = {file.name: file for file in checkpoint.files}
    yield from _only_one({*before}, {*now})
    for name in sorted({*before} & {*now}):
        odd = _difference(before[name], now[name])
        if odd:
            yield f"`{name}` has {odd}"


def _difference(before: SourceFileEntry, now: SourceFile) -> str | None:
    """Say what of a weight file is another; a digest that only one of them knows is none."""
    if before.size != now.size:
        return f"{now.size} bytes, expected {before.size}"
    if before.header_sha256 != now.header_sha256:
        return "another header"
    if before.sha256 and now.sha256 and before.sha256 != now.sha256:
        return f"SHA-256 {now.sha256}, expected {before.sha256}"
    return None


def _odd_side_files(manifest: Manifest, checkpoint: Checkpoint) -> Iterator[str]:
    kept = {entry.path: entry for entry in manifest.files}
    before = manifest.plan.get("side files", "").splitlines()
    yield from _only_one({*before}, {*checkpoint.side_files})
    for name in sorted({*before} & {*checkpoint.side_files}):
        sha256 = hashlib.sha256()
        for chunk in checkpoint.origin.chunks(name):
            sha256.update(chunk)
        entry = kept.get(kept_name(name))
        if entry is None or entry.sha256 != sha256.hexdigest():
            expected = entry.sha256 if entry else "none"
            yield f"`{name}` has SHA-256 {sha256.hexdigest()}, expected {expected}"


def _only_one(before: set[str], now: set[str]) -> Iterator[str]:
    yield from (f"`{name}` is missing" for name in sorted(before - now))
    yield from (f"`{name}` was not there" for name in sorted(now - before))
