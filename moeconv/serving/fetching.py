"""Where are the files of the model that an engine was told to serve? Here, or fetched first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from moeconv.errors import SourceError
from moeconv.output.names import MANIFEST_NAME

_UNREAD: Final = ("restore/*", ".moeconv/*")
"""What no engine reads of a converted repository."""

_T = TypeVar("_T")


def is_converted(name: str, revision: str | None, cache: str | None) -> bool:
    """Say whether a name is that of a converted model; what cannot be looked at is none of ours."""
    if Path(name).is_dir():
        return (Path(name) / MANIFEST_NAME).exists()
    try:
        return _commit(name, revision, cache) is not None
    except SourceError:
        return False


def fetch(name: str, revision: str | None, cache: str | None) -> Path:
    """Return the directory of a converted model, fetched into the library's cache if need be.

    Parameters
    ----------
    name
        A directory, or a repository on the Hub.
    revision
        Of the repository; `None` for its main branch.
    cache
        The cache to use; `None` for the library's own.

    Raises
    ------
    SourceError
        It is not converted; or the Hub has no such repository or revision for us, or cannot be
        reached, and the files are not in the cache.
    """
    if Path(name).is_dir():
        return Path(name)
    commit = _commit(name, revision, cache)
    if commit is None:
        message = f"`{MANIFEST_NAME}` is not in `{name}`"
        raise SourceError(message, hint="is this a converted model?")
    return _fetched(name, commit, cache)


@functools.cache
def _commit(name: str, revision: str | None, cache: str | None) -> str | None:
    """Return the commit that has the manifest; one a process, though the branch may move on."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    def ask() -> str | None:
        try:
            path = hf_hub_download(name, MANIFEST_NAME, revision=revision, cache_dir=cache)
        except RemoteEntryNotFoundError:
            return None
        return Path(path).parent.name

    return _said(f"find `{name}`", ask)


@functools.cache
def _fetched(name: str, commit: str, cache: str | None) -> Path:
    from huggingface_hub import snapshot_download

    def ask() -> str:
        return snapshot_download(
            name, revision=commit, cache_dir=cache, ignore_patterns=list(_UNREAD)
        )

    return Path(_said(f"fetch `{name}` at {commit}", ask))


def _said(what: str, ask: Callable[[], _T]) -> _T:
    """Return what the library returns, or say in words why it does not."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    words = (
        (HFValidationError, "it is neither a directory nor a repository", "look at the spelling"),
        (GatedRepoError, "its authors give access on request", "ask on its page on the Hub"),
        (RepositoryNotFoundError, "there is none for you", "`hf auth login`, if it is private"),
        (RevisionNotFoundError, "it has no such revision", "look at its branches on the Hub"),
        (LocalEntryNotFoundError, "the Hub is not reached, nor is it in the cache", "try again"),
    )
    try:
        return ask()
    except tuple(kind for kind, _, _ in words) as error:
        reason, hint = next(row[1:] for row in words if isinstance(error, row[0]))
        message = f"cannot {what}: {reason}"
        raise SourceError(message, hint=hint) from error
