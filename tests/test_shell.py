"""Commands that are printed are run as they are copied."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.shell import typed
from tests import runs

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


@given(NAMES)
def test_a_name_is_one_word_in_one_line(name):
    word = typed(name)
    assert len(word.splitlines()) == 1
    if name.isprintable():
        assert shlex.split(word) == [f"./{name}" if name.startswith("-") else name]


@pytest.mark.parametrize(
    "name", ["a b", "-o", "new\nline", "it's\x1b[1m", "$(id) `id`", "\udcff\\"]
)
def test_a_shell_reads_it_back(name):
    command = ["bash", "-c", f"printf %s {typed(name)}"]
    said = subprocess.run(command, capture_output=True, check=True).stdout
    assert said == os.fsencode(f"./{name}" if name.startswith("-") else name)


def test_what_is_to_be_run_next_can_be_copied(make_checkpoint, tmp_path):
    source = make_checkpoint("a {model} $(id)")
    seen = runs.moeconv("inspect", source)
    assert f"moeconv trtllm '{source}'" in seen.stdout, seen.stderr
    done = runs.moeconv("trtllm", source, "--out", "-o", cwd=tmp_path)
    assert f"moeconv verify ./-o --read-data --source '{source}'" in done.stderr
    assert "vllm serve ./-o " in done.stderr
    assert "moeconv verify ./-o" in runs.moeconv("inspect", "./-o", cwd=tmp_path).stdout
