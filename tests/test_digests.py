"""Many digests in one call are those of the library, one by one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from moeconv.ranges.digests import digest_loop, xxh3_each
from moeconv.ranges.rows import MANY

# Where XXH3 takes another way: 0, 3, 8, 16, 128, 240 bytes, and a block of 1024.
SIZES = st.sampled_from([0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1024, 1025, 5000])


@pytest.fixture(autouse=True)
def _loaded() -> None:
    """Have the compiled loop there, whatever ran before: few bytes are not worth loading it."""
    digest_loop()


def tables(count: int, sizes: list[int], gap: int) -> list[np.ndarray]:
    """Return tables of `count` rows; those of each are `gap` bytes apart."""
    rng = np.random.default_rng(count)
    return [rng.integers(0, 256, (count, size + gap), np.uint8)[:, :size] for size in sizes]


@given(
    count=st.integers(1, 6), sizes=st.lists(SIZES, min_size=1, max_size=3), gap=st.integers(0, 3)
)
@example(count=MANY, sizes=[0, 1], gap=0)
def test_rows_go_one_after_the_other(count, sizes, gap):
    made = tables(count, sizes, gap)
    expected = [
        xxhash.xxh3_128_hexdigest(table[i].tobytes()) for i in range(count) for table in made
    ]
    assert xxh3_each(made) == expected


def test_bytes_that_do_not_follow_each_other_are_no_row():
    columns = np.zeros((8, 8), np.uint8)[:, ::2]
    with pytest.raises(AssertionError, match="do not follow"):
        xxh3_each([columns])


@pytest.fixture(params=["numba", "the library's function"])
def lacking(request, monkeypatch) -> Iterator[str]:
    """Return what is not there."""
    if request.param == "numba":
        monkeypatch.setitem(sys.modules, "moeconv.ranges.digestloop", None)
    else:
        names = ("no_such_function",)
        monkeypatch.setattr("moeconv.ranges.digestloop._NAMES", names)
    digest_loop.cache_clear()
    yield request.param
    digest_loop.cache_clear()


def test_the_same_without_what_makes_it_one_call(lacking):
    made = tables(MANY, [100, 300], 1)
    expected = [
        xxhash.xxh3_128_hexdigest(table[i].tobytes()) for i in range(MANY) for table in made
    ]
    assert xxh3_each(made) == expected
    assert digest_loop() is None, lacking


def test_a_small_conversion_loads_no_compiled_loops(source, tmp_path):
    code = (
        "import sys; from moeconv.cli import main\n"
        f"sys.argv = ['moeconv', 'trtllm', {str(source)!r}, '--out', {str(tmp_path / 'out')!r}]\n"
        "sys.argv += ['--device', 'cpu']\n"
        "try: main()\n"
        "finally: print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.skipif(sys.platform != "linux", reason="wheels of other systems may hide it")
def test_wheels_of_the_library_show_its_function():
    assert find_spec("xxhash._xxhash") is not None
    assert digest_loop() is not None
