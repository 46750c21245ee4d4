"""A digest is the same however its bytes are handed over."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from moeconv.conversion.reading import digest


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 1 << 18, (1 << 18) + 1])
def test_a_digest_is_that_of_the_whole(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert digest(data) == xxhash.xxh3_128_hexdigest(data)
    if size % 2 == 0:
        assert digest(data.reshape(2, -1)) == xxhash.xxh3_128_hexdigest(data)
