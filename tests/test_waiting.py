"""What an answer says of when to ask again."""

from __future__ import annotations

import pytest

from moeconv.waiting import asked_wait_s


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "Mon, 30 Nov 2026 10:00:00 GMT"}, None),
        ({"RateLimit": '"resolvers";r=0;t=55'}, 56),
        ({"RateLimit": '"resolvers";r=3;t=55'}, None),
        ({"Retry-After": "7", "RateLimit": '"api";r=0;t=55'}, 7),
    ],
)
def test_what_is_said_counts(headers: dict[str, str], seconds: float | None):
    assert asked_wait_s(headers) == seconds
