"""How do a manifest and notes become JSON and come back, and is what comes back to be believed?

Decoding is strict about what is there and lenient about what a later version adds.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from moeconv.errors import SourceError, VerifyError
from moeconv.output.manifest import FORMAT, Manifest
from moeconv.output.names import MANIFEST_NAME
from moeconv.paths import is_below, read_regular

MOST_BYTES: Final = 1 << 29
"""The largest manifest or note that is read."""

_UNDIGESTED: Final = ("run", "run_digest", "digest")
_AGAIN: Final = "copy it again, or convert again with `--overwrite`"

_T = TypeVar("_T")


def encode(value: object) -> bytes:
    """Return a value as JSON, the same bytes for the same value."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def decode(data: bytes, kind: type[_T], what: str) -> _T:
    """Return a value of `kind` from JSON.

    Raises
    ------
    VerifyError
        The JSON is broken or too deep, or a field is missing or of another type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"`{what}` cannot be read: {error}"
        raise VerifyError(message) from error


def read_note(path: Path, kind: type[_T]) -> _T | None:
    """Return what a process of an unfinished run noted; a broken note is none."""
    try:
        return decode(read_regular(path, MOST_BYTES), kind, path.name)
    except (OSError, VerifyError):
        return None


def encode_sealed(manifest: Manifest) -> bytes:
    """Return a manifest as JSON, with its own digests."""
    own, run = _digests_of(
        {field.name: getattr(manifest, field.name) for field in fields(manifest)}
    )
    return encode(replace(manifest, digest=own, run_digest=run))


def check_unchanged(data: bytes) -> None:
    """Compare a manifest, as JSON, with its own digests: against a slip, not against malice.

    Raises
    ------
    VerifyError
        It is not as it was written.
    """
    found = decode(data, _Digests, MANIFEST_NAME)
    if (found.digest, found.run_digest) != _own_digests(data):
        message = f"`{MANIFEST_NAME}` was changed after the conversion: its own digest differs"
        raise VerifyError(message, hint=_AGAIN)
    # A parser keeps one of two fields of a name; what lays out the text keeps both.
    once = msgspec.json.encode(decode(data, object, MANIFEST_NAME))
    if len(once) < len(msgspec.json.format(data, indent=-1)):
        message = f"`{MANIFEST_NAME}` was changed after the conversion: a field is there twice"
        raise VerifyError(message, hint=_AGAIN)


class _Digests(msgspec.Struct):
    """What a manifest says of itself."""

    digest: str
    run_digest: str


def _own_digests(data: bytes) -> tuple[str, str]:
    """Digest what is there, fields of a later version too; how the run went, apart from all else.

    Two conversions of the same plan differ in the latter alone.
    """
    return _digests_of(decode(data, dict[str, object], MANIFEST_NAME))


def _digests_of(table: dict[str, object]) -> tuple[str, str]:
    """Return the same, of the manifest's fields."""
    rest = {name: table[name] for name in table if name not in _UNDIGESTED}
    own, of_run = (
        hashlib.sha256(msgspec.json.encode(it, order="sorted")).hexdigest()
        for it in (rest, table["run"])
    )
    return own, of_run


def read_manifest(root: Path) -> Manifest:
    """Read the manifest of a converted directory.

    Raises
    ------
    SourceError
        There is none: the directory is not converted, or not finished.
    VerifyError
        It is broken or of a later format.
    """
    return parse_manifest(manifest_bytes(root))


def manifest_bytes(root: Path) -> bytes:
    """Return the manifest of a converted directory as it is written.

    Raises
    ------
    SourceError
        There is none: the directory is not converted, or not finished.
    """
    try:
        return read_regular(root / MANIFEST_NAME, MOST_BYTES)
    except FileNotFoundError:
        hint = "is this a converted directory?"
        if (root / ".moeconv").is_dir():
            hint = "the conversion is not finished; run the same `moeconv` command again"
        elif not root.exists():
            hint = "give a directory; `hf download` fetches one that is on the Hub"
        message = f"`{MANIFEST_NAME}` is not in `{root}`"
        raise SourceError(message, hint=hint) from None
    except NotADirectoryError:
        message = f"`{root}` is not a directory"
        raise SourceError(message, hint=f"give the directory: `{root.parent}`?") from None
    except OSError as error:
        message = f"`{root / MANIFEST_NAME}` cannot be read: {error.strerror}"
        raise SourceError(message) from error


def parse_manifest(data: bytes) -> Manifest:
    """Return a manifest, wherever its bytes are from.

    Raises
    ------
    VerifyError
        It is broken or of a later format.
    """
    manifest = decode(data, Manifest, MANIFEST_NAME)
    if manifest.format != FORMAT:
        message = f"`{MANIFEST_NAME}` has format {manifest.format}, expected {FORMAT}"
        raise VerifyError(message, hint="it was written by another version of moeconv")
    check_names(manifest)
    return manifest


def check_names(manifest: Manifest) -> None:
    """Refuse names that lead out of the directory, whoever wrote them."""
    names = {entry.path for entry in manifest.files}
    names |= {entry.file for entry in manifest.entries()}
    odd = sorted(name for name in names if not is_below(name))
    if odd:
        message = f"`{MANIFEST_NAME}` names the file {odd[0]!r}, outside the directory"
        raise VerifyError(message, hint="do not use this directory: moeconv writes no such name")
