"""What is said of the source's files? Their digests, also those that were read after the end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moeconv.errors import VerifyError
from moeconv.output.manifest import Manifest, SourceFileEntry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moeconv.checkpoint.types import SourceFile
    from moeconv.output.directory import OutputDirectory


def source_entry(file: SourceFile) -> SourceFileEntry:
    """Return what a manifest says of a weight file of the source."""
    return SourceFileEntry(
        file.name, file.size, file.header_sha256, file.probe_xxh3, file.sha256, file.sha256_from
    )


def note_digests(directory: OutputDirectory, files: Iterable[SourceFile]) -> Manifest:
    """Put digests of source files that were read into the manifest of a finished conversion.

    Returns
    -------
    Manifest
        What is there now: rewritten only if it says more.

    Raises
    ------
    VerifyError
        A file is another one than was converted.
    """
    manifest = directory.manifest()
    read = {file.name: source_entry(file) for file in files if file.was_read}
    known = []
    for entry in manifest.source.files:
        found = read.get(entry.name, entry)
        if entry.sha256 not in {None, found.sha256}:
            message = (
                f"`{entry.name}` of the source is not what was converted: expected SHA-256 "
                f"{entry.sha256}, found {found.sha256}"
            )
            raise VerifyError(message, hint="the source changed; convert again with `--overwrite`")
        known.append(found)
    source = replace(manifest.source, files=tuple(known))
    if source != manifest.source:
        directory.reseal(replace(manifest, source=source))
    return directory.manifest()
