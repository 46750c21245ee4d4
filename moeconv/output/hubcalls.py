"""What does the Hub answer, in words, and which answers pass if it is asked again?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from huggingface_hub import set_client_factory
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import disable_progress_bars, get_session, httpx

from moeconv.errors import MoeconvError, OutputError
from moeconv.waiting import asked_wait_s

_DELAYS_S: Final = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""On top of what the library itself repeats: a minute in which the Hub or the network is away."""

TIMEOUT_S: Final = 60.0
"""A connection on which nothing moves for so long is given up, and the request is repeated."""

_PATIENCE_S: Final = 300.0
"""The library repeats by itself, time-out after time-out: longer than this, we do not add to it."""

_LONGEST_WAIT_S: Final = 3600.0
"""The Hub counts commits by the hour."""

_PASSING: Final = frozenset({408, 409, 429, 500, 502, 503, 504})
_LOGIN: Final = "`hf auth login`, or set `HF_TOKEN` to a token that may write there"

_WORDS: Final[Mapping[int, tuple[str, str]]] = {
    401: ("the token is not accepted", _LOGIN),
    402: ("there is no storage left", "free some on the Hub, or get more"),
    403: ("this is not allowed", "is it your repository, may the token write, is there storage?"),
    404: ("there is no such repository or revision for you", _LOGIN),
    412: ("somebody else has changed it meanwhile", "run the same command again"),
    413: ("that is too large for one request", "give a smaller `--max-shard-size`"),
    429: ("too many requests", "wait, then run the same command again; what is sent is kept"),
}
_AWAY: Final = ("the Hub is not reachable", "run the same command again; what is sent is kept")

_T = TypeVar("_T")


def be_patient() -> None:
    """Give the library's client time-outs, which it has none of, and keep its bars away."""
    hooks = get_session().event_hooks  # which refuse when offline, and number requests

    def client() -> httpx.Client:
        patience = httpx.Timeout(TIMEOUT_S, connect=15, pool=None)
        return httpx.Client(event_hooks=hooks, follow_redirects=True, timeout=patience)

    set_client_factory(client)
    disable_progress_bars()


def ask(what: str, call: Callable[[], _T], kind: type[MoeconvError] = OutputError) -> _T:
    """Return what a call to the Hub returns; ask again where that helps.

    Parameters
    ----------
    what
        What is being done, for the message: as `create `org/name``.
    call
        The call; safe to repeat.
    kind
        What a refusal is: of what is written, or read.

    Raises
    ------
    MoeconvError
        Of that kind: the Hub refuses, or stays away.
    """
    end_s = time.monotonic() + _PATIENCE_S
    for delay_s in (*_DELAYS_S, None):
        try:
            return call()
        except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
            cause = _cause(error)
            if cause is None:
                raise
            wait_s = _wait_s(cause, delay_s if time.monotonic() < end_s else None)
            if wait_s is None:
                raise _words(what, cause, kind) from error
        time.sleep(wait_s)
    raise AssertionError


def _cause(error: BaseException) -> Exception | None:
    """Return what the Hub or the network said; the library wraps it where uploads fail."""
    if isinstance(error, httpx.HTTPError | LocalTokenNotFoundError | ConnectionError):
        return error
    if isinstance(error, ValueError) and "LFS batch API" in str(error):
        return error
    return _cause(error.__cause__) if error.__cause__ is not None else None


def _wait_s(cause: Exception, delay_s: float | None) -> float | None:
    """Return how long to wait before asking again; none where it does not help."""
    if isinstance(cause, ValueError | LocalTokenNotFoundError | OfflineModeIsEnabled):
        return None
    if not isinstance(cause, HfHubHTTPError):
        return delay_s  # the network
    if cause.response.status_code not in _PASSING or delay_s is None:
        return None
    asked_s = asked_wait_s(cause.response.headers)
    return delay_s if asked_s is None else min(asked_s, _LONGEST_WAIT_S)


def _words(what: str, cause: Exception, kind: type[MoeconvError]) -> MoeconvError:
    if isinstance(cause, LocalTokenNotFoundError):
        return kind(f"cannot {what}: there is no token", hint=_LOGIN)
    if isinstance(cause, OfflineModeIsEnabled):
        message = f"cannot {what}: `HF_HUB_OFFLINE` is set"
        return kind(message, hint="unset it to reach the Hub")
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        words, hint = _WORDS.get(status, (f"the Hub answers {status}", _AWAY[1]))
        said = cause.server_message or ""
        detail = f" ({status}: {' '.join(said.split())})" if said else f" ({status})"
        return kind(f"cannot {what}: {words}{detail}", hint=hint)
    if isinstance(cause, ValueError):
        message = f"cannot {what}: {' '.join(str(cause).split())}"
        return kind(message, hint="is there storage left?")
    if isinstance(cause, httpx.TimeoutException):
        message = f"cannot {what}: nothing moves for {TIMEOUT_S:g} s, however often it is tried"
        return kind(message, hint=_AWAY[1])
    reason = str(cause) or type(cause).__name__
    return kind(f"cannot {what}: {_AWAY[0]} ({reason})", hint=_AWAY[1])
