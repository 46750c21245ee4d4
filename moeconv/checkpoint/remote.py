"""One file of the Hub, by byte ranges: a signed address, renewed; a cut stream, taken up again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, httpx

from moeconv.checkpoint.hubcalls import DELAYS_S, TIMEOUT_S, ask, in_words, wait_before_retry
from moeconv.errors import SourceError

_PARTIAL: Final = 206
_EXPIRED: Final = (401, 403)


class RemoteFile:
    """A file of one commit; safe to use from several threads."""

    def __init__(self, repo: str, commit: str, name: str) -> None:
        self._url = hf_hub_url(repo, name, revision=commit)
        self._what = f"{repo}@{commit}/{name}"
        self._location = ""
        self._lock = threading.Lock()

    def fill(self, begin: int, out: memoryview) -> None:
        """Fill memory from an offset on.

        Raises
        ------
        SourceError
            The Hub refuses, stays away, or has fewer bytes than it said.
        """
        done, failures = 0, 0
        while done < len(out):
            location = self._address()
            at = done
            try:
                for chunk in _stream(location, begin + done, begin + len(out)):
                    taken = chunk[: len(out) - done]
                    out[done : done + len(taken)] = taken
                    done += len(taken)
                if done < len(out):
                    raise ConnectionError("the connection ended early")
            except (httpx.HTTPError, OSError) as error:
                failures = 1 if done > at else failures + 1
                self._get_over(error, location, failures)

    def _get_over(self, error: Exception, location: str, failures: int) -> None:
        """Wait for what passes, and renew an address that is too old; raise what is final."""
        delay_s = DELAYS_S[failures - 1] if failures <= len(DELAYS_S) else None
        response = getattr(error, "response", None)
        if response is not None and response.status_code in _EXPIRED and delay_s is not None:
            with self._lock:
                if self._location == location:
                    self._location = ""
            time.sleep(delay_s)
            return
        wait_s = wait_before_retry(error, delay_s)
        if wait_s is None:
            raise in_words(self._what, error) from error
        time.sleep(wait_s)

    def _address(self) -> str:
        with self._lock:
            if not self._location:
                # A token goes to the Hub, which checks it; the address has a signature of its own.
                found = ask(
                    self._what,
                    lambda: get_hf_file_metadata(self._url, timeout=TIMEOUT_S),
                )
                self._location = found.location
            return self._location


def _stream(location: str, begin: int, end: int) -> Iterator[bytes]:
    """Yield the bytes `[begin, end)` behind an address."""
    is_hub = urlsplit(location).netloc == urlsplit(constants.ENDPOINT).netloc
    headers = build_hf_headers() if is_hub else {}
    headers |= {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", location, headers=headers, timeout=TIMEOUT_S) as response:
        hf_raise_for_status(response)
        if response.status_code != _PARTIAL:
            message = f"`{urlsplit(location).netloc}` does not send ranges of files"
            raise SourceError(message, hint="fetch whole files, with `--keep-source`")
        yield from response.iter_raw()
