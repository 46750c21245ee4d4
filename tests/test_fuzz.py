"""Whatever a file holds, reading it gives a result or a `MoeconvError`."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing import Target, changed, targets

KINDS = (
    *("header", "index", "config", "manifest", "converted-config", "converted-header"),
    *("plan", "draft", "record"),
)
NIGHTLY = 12_000
"""Inputs of each kind: more than 100,000 in all."""

GUIDED_S = 60


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Target]]:
    with tempfile.TemporaryDirectory() as folder:
        yield targets(Path(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_sound_files_are_read(made, kind):
    assert made[kind].read_all(made[kind].sound) == "read"


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_is_a_traceback(made, kind):
    @settings(max_examples=60)
    @given(st.randoms(use_true_random=False))
    def attempt(chance: random.Random) -> None:
        made[kind].read_all(changed(made[kind].sound, chance))

    attempt()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_no_input_of_many_is_a_traceback(made, kind, record):
    results: Counter[str] = Counter()

    @settings(max_examples=NIGHTLY, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def attempt(chance: random.Random) -> None:
        results[made[kind].read_all(changed(made[kind].sound, chance))] += 1

    attempt()
    record(f"fuzzing: {kind}", sum(results.values()), "a result or an error in words")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_no_input_that_reaches_something_new_is_a_traceback(tmp_path, kind, record):
    pytest.importorskip("atheris", reason="no wheels for every Python")
    script = str(Path(__file__).with_name("guided.py"))
    command = [sys.executable, "-P", script, kind, str(tmp_path), str(GUIDED_S)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tried = int(re.findall(r"number_of_executed_units: (\d+)", done.stderr)[-1])
    record(f"fuzzing, led by coverage: {kind}", tried, "a result or an error in words")
