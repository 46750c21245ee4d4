"""How long does the Hub ask one to wait?"""

from __future__ import annotations

from collections.abc import Mapping

from huggingface_hub.utils import parse_ratelimit_headers


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Return what an answer says of when to ask again, in seconds; none where it says nothing.

    `Retry-After` counts, and where the Hub says when the window of its rate limit ends, that.
    """
    said = headers.get("Retry-After", "")
    if said.isdecimal():
        return float(said)
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds + 1) if limit and limit.remaining == 0 else None
