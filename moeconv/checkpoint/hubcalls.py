"""What does the Hub answer to one who reads, in words? And which answers pass?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx

from moeconv.errors import SourceError
from moeconv.waiting import asked_wait_s

TIMEOUT_S: Final = 30.0
"""On a connection on which nothing moves for so long, nothing will."""

DELAYS_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0)
_PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})
_LONGEST_WAIT_S: Final = 300.0
_HOST: Final = "https://huggingface.co"
_LOGIN: Final = "is the name right? for a private one: `hf auth login`, or set `HF_TOKEN`"

_REFUSALS: Final[tuple[tuple[type[Exception], str, str], ...]] = (
    (
        OfflineModeIsEnabled,
        "`HF_HUB_OFFLINE` is set",
        "unset it, or fetch it first with `hf download {repo}`",
    ),
    (
        GatedRepoError,
        "access to it is restricted",
        "ask for access on https://huggingface.co/{repo}, and log in with `hf auth login`",
    ),
    (RepositoryNotFoundError, "there is no such repository for you", _LOGIN),
    (
        RevisionNotFoundError,
        "it has no such revision",
        "give a branch, a tag or a commit behind the `@`",
    ),
    (EntryNotFoundError, "it has no such file", "is this a checkpoint in safetensors?"),
)
"""What the Hub refuses for good; the first row that fits counts."""

_T = TypeVar("_T")


def ask(what: str, call: Callable[[], _T], delays_s: Sequence[float] = DELAYS_S) -> _T:
    """Return what a call to the Hub returns; ask again, after these delays, where that helps.

    Raises
    ------
    SourceError
        The Hub refuses, or stays away.
    """
    for delay_s in (*delays_s, None):
        try:
            return call()
        except (httpx.HTTPError, OSError) as error:
            wait_s = wait_before_retry(error, delay_s)
            if wait_s is None:
                raise in_words(what, error) from error
        time.sleep(wait_s)
    raise AssertionError


def wait_before_retry(error: Exception, delay_s: float | None) -> float | None:
    """Return how long to wait before asking again; none where it does not help."""
    if isinstance(error, OfflineModeIsEnabled) or delay_s is None:
        return None
    if not isinstance(error, HfHubHTTPError):
        return delay_s
    if error.response.status_code not in _PASSING:
        return None
    asked_s = asked_wait_s(error.response.headers)
    return max(delay_s, 1.0) if asked_s is None else min(asked_s, _LONGEST_WAIT_S)


def in_words(what: str, error: Exception) -> SourceError:
    """Return what went wrong while reading `what`, and what to do."""
    words, hint = _words(what, error)
    return SourceError(f"cannot read `{what}`: {words}", hint=hint)


def _words(what: str, error: Exception) -> tuple[str, str]:
    for kind, words, hint in _REFUSALS:
        if isinstance(error, kind):
            return words, hint.format(repo=what.partition("@")[0])
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        said = " ".join((error.server_message or "").split())
        hint = _LOGIN if status in {401, 403} else "run the same command again, later"
        return f"the Hub answers {status}" + (f" ({said})" if said else ""), hint
    if isinstance(error, httpx.TimeoutException):
        words = f"nothing comes for {TIMEOUT_S:g} s, however often it is asked"
        return words, "run the same command again to go on"
    reason = str(error) or type(error).__name__
    where = "" if constants.ENDPOINT == _HOST else f" at `{constants.ENDPOINT}`"
    return f"the Hub{where} is not reachable ({reason})", "run the same command again to go on"
