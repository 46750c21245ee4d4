"""The fake Hub: what it holds, what it has seen, and what it is to do wrong."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.hub.store import Store
from tests.hub.xet import Cas


@dataclass
class Fault:
    """What to do to requests whose method and path (with its query) fit, `times` times.

    Attributes
    ----------
    skip
        How many that fit go through first.
    status, headers
        Answer so, instead of what was asked for.
    cut
        Close the connection after so many bytes of the body; 0 also leaves the head out.
    stall_s
        Before a cut, send and read nothing for so long.
    delay_s
        Wait so long, then answer as always.
    """

    method: str
    pattern: str
    times: int = 1
    skip: int = 0
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    stall_s: float = 0.0
    delay_s: float = 0.0


@dataclass(frozen=True)
class Seen:
    """A request that was answered: `sent` counts the bytes of the body."""

    method: str
    path: str
    range: str
    status: int
    sent: int
    user_agent: str


class FakeHub:
    """One Hub, for one test.

    Parameters
    ----------
    root
        Where bytes of files are kept.
    url, cdn_url
        Where it answers, and where it sends the bytes of large files from.
    """

    def __init__(self, root: Path, url: str = "", cdn_url: str = "") -> None:
        self.store = Store(root)
        self.cas = Cas(root / "cas")
        self.url, self.cdn_url = url, cdn_url
        self.token, self.user = "hf_fake", "ci"
        self.page_size = 1000
        self.part_bytes: int | None = None  # uploads larger than this go up in parts
        self.xet = False
        self.has_cdn = True  # else it sends large files by itself, as mirrors do
        self.ignored: str | None = None  # what a .gitignore in the repository would drop
        self.faults: list[Fault] = []
        self.log: list[Seen] = []
        self.running = 0  # requests that are being answered
        self.lock = threading.RLock()
        self._signatures: set[str] = set()

    @staticmethod
    def settings(url: str) -> dict[str, str]:
        """Return what a process must find set before it imports `huggingface_hub`."""
        return {
            "HF_ENDPOINT": url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def sign(self) -> str:
        """Return a signature for an address of the CDN."""
        signature = secrets.token_hex(8)
        self._signatures.add(signature)
        return signature

    def is_signed(self, signature: str) -> bool:
        """Say whether a signature is one of ours and still good."""
        return signature in self._signatures

    def expire(self) -> None:
        """Let every signature be too old from now on."""
        self._signatures.clear()

    def has_blob(self, oid: str) -> bool:
        """Say whether the bytes of an LFS file are here, by whatever way they came."""
        return self.store.blob(oid).exists() or self.cas.find(oid) is not None

    def fault(self, method: str, path: str) -> Fault | None:
        """Return what is to go wrong with a request, once."""
        with self.lock:
            for fault in self.faults:
                fits = fault.method == method and re.search(fault.pattern, path)
                if not fits or fault.times == 0:
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def seen(self, method: str, pattern: str) -> list[Seen]:
        """Return the requests so far whose method and path fit.

        One is noted once it is answered, and whoever asked may be here before that is done.
        """
        end_s = time.monotonic() + 0.3
        while self.running and time.monotonic() < end_s:
            time.sleep(0.001)
        return [it for it in self.log if it.method == method and re.search(pattern, it.path)]

    @property
    def sent_bytes(self) -> int:
        """Bytes of all bodies that were sent so far."""
        return sum(it.sent for it in self.log)
