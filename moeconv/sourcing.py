"""What did the person mean by SRC? A directory, a repository of the Hub, or a model by its name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeconv.checkpoint.index import open_checkpoint, open_origin
from moeconv.checkpoint.local import LocalOrigin
from moeconv.checkpoint.sidefiles import MANIFEST_NAME
from moeconv.errors import SourceError, UnsupportedError
from moeconv.families import FAMILIES

if TYPE_CHECKING:
    from moeconv.checkpoint.origin import Origin
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.output.records import Asked

_WORD: Final = r"[A-Za-z0-9][\w.-]*"
_REPO: Final = re.compile(rf"({_WORD}/{_WORD})(?:@([\w./-]+))?", re.ASCII)
_NAME: Final = re.compile(rf"({_WORD})(?:@([\w./-]+))?", re.ASCII)
_URL: Final = re.compile(rf"({_WORD}/{_WORD})(?:/tree/([\w./%-]+?))?/?", re.ASCII)
_HOST: Final = "https://huggingface.co"


def open_source(source: str | Path, *, keep: bool = False) -> Checkpoint:
    """Open the checkpoint that a person named.

    Parameters
    ----------
    source
        A directory, `org/name[@revision]`, the address of a repository, or a model's bare name.
        What is there as a directory is that.
    keep
        Fetch the files of a repository whole, into the library's cache, and read them there.

    Returns
    -------
    Checkpoint
        Its config, and of each tensor name, dtype, shape, file and byte range. No weight is read.

    Raises
    ------
    SourceError
        It is not there, is not one thing, or cannot be read.
    UnsupportedError
        It is converted already, or holds no safetensors weights.
    """
    return open_found(find_source(source), keep=keep)


@dataclass(frozen=True, slots=True)
class Found:
    """What a person named, where that is, and the revision of it that is meant."""

    source: str
    origin: Origin
    revision: str | None = None

    @property
    def is_converted(self) -> bool:
        """Whether it is a repository with a converted model in it."""
        return self.origin.repo is not None and self.origin.holds(MANIFEST_NAME)


def find_source(source: str | Path) -> Found:
    """Return the place that a person named, whatever is in it; see `open_source`."""
    source = os.fspath(source)
    found = None if is_local(source) else _repository(source)
    if found is None:
        return Found(source, LocalOrigin(Path(source)))
    from moeconv.checkpoint.hub import find_on_hub

    repo, revision = found
    return Found(source, find_on_hub(repo, revision), revision or "main")


def open_found(found: Found, *, keep: bool = False) -> Checkpoint:
    """Open the checkpoint at a place; see `open_source`."""
    source, origin = found.source, found.origin
    if origin.repo is None:
        return open_checkpoint(source)
    if found.is_converted:
        message = f"`{source}` is already converted: it holds `{MANIFEST_NAME}`"
        hint = f"point at the original checkpoint; `moeconv inspect {source}` shows this one"
        raise UnsupportedError(message, hint=hint)
    from moeconv.checkpoint.hub import HubOrigin, fetch

    checkpoint = open_origin(origin)
    if keep and isinstance(origin, HubOrigin):
        checkpoint = open_origin(fetch(checkpoint, origin))
    which = "" if origin.repo in source else f"`{origin.repo}` "
    note = f"`{source}` is {which}on the Hub, at commit {origin.commit}"
    return replace(checkpoint, asked=found.revision, notes=(note,))


def pinned(checkpoint: Checkpoint, begun: Asked | None) -> str | None:
    """Return what to open in place of a checkpoint whose branch has moved since a run began.

    Parameters
    ----------
    checkpoint
        What was asked for now.
    begun
        What the run began with, if one did.
    """
    origin = checkpoint.origin
    if begun is None or (begun.repo, begun.revision) != (origin.repo, checkpoint.asked):
        return None
    return None if begun.commit == origin.commit else f"{begun.repo}@{begun.commit}"


def is_repository(name: str) -> bool:
    """Say whether what is converted could be a repository, `org/name` or `org/name@revision`."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(@[^\s@]+)?", name, re.ASCII) is not None


def is_local(source: str) -> bool:
    """Say whether a source is something on this machine, be it fit to be opened or not."""
    try:
        return Path(source).exists()
    except OSError:  # a name that no disk takes
        return True


def _repository(source: str) -> tuple[str, str | None] | None:
    """Return repository and revision, or none for what can only be a directory."""
    for host in (_HOST, os.environ.get("HF_ENDPOINT", _HOST)):
        rest = source.removeprefix(f"{host.rstrip('/')}/")
        if rest != source and (match := _URL.fullmatch(rest)):
            return match[1], match[2]
    if match := _REPO.fullmatch(source):
        return match[1], match[2]
    if match := _NAME.fullmatch(source):
        return _by_name(match[1], match[2]), match[2]
    return None


def _by_name(name: str, revision: str | None) -> str:
    """Return the repository of this name, if exactly one of the publishers has it."""
    from moeconv.checkpoint.hub import is_on_hub, where_asked

    asked = [f"{publisher}/{name}" for publisher in publishers()]
    with ThreadPoolExecutor(len(asked)) as pool:
        try:
            answers = list(pool.map(is_on_hub, asked))
        except SourceError as problem:
            message = f"`{name}` is not a directory here, and cannot be looked for: {problem}"
            hint = f"is the directory spelt so? for a model of the Hub: {problem.hint}"
            raise SourceError(message, hint=hint) from problem
    found = [repo for repo, is_there in zip(asked, answers, strict=True) if is_there]
    if len(found) == 1:
        return found[0]
    at = f"@{revision}" if revision else ""
    if found:
        message = f"`{name}` is not a directory here, and {len(found)} publishers have such a model"
        hint = "give one of: " + ", ".join(f"`{repo}{at}`" for repo in found)
        raise SourceError(message, hint=hint)
    message = f"`{name}` is not a directory here, and none of the known publishers has such a model"
    message += where_asked()
    hint = f"give a directory, or `org/{name}{at}`; asked for: {', '.join(publishers())}"
    raise SourceError(message, hint=hint)


def publishers() -> list[str]:
    """Return who publishes models of the families, sorted."""
    return sorted(set(_publishers()), key=str.lower)


def _publishers() -> Iterator[str]:
    for family in FAMILIES:
        yield from family.publishers
