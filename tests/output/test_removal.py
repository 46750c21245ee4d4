"""`--overwrite` removes what moeconv wrote, nothing else, and never under a run that is alive."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from moeconv.errors import OutputError
from tests import runs
from tests.runs import Wanted


def test_another_run_that_is_alive_is_not_overwritten(source, make_checkpoint, tmp_path):
    """A stopped process would else go on in the new run's directory."""
    out = tmp_path / "out"
    first = runs.start("slow", 0.1, "trtllm", source, "--out", out, "--max-shard-size", "30kB")
    until_s = time.monotonic() + 30
    while not list(out.glob(".moeconv/records/*")) and time.monotonic() < until_s:
        time.sleep(0.02)
    first.send_signal(signal.SIGSTOP)
    other = make_checkpoint("other", seed=7)
    try:
        refused = runs.moeconv("trtllm", other, "--out", out, "--overwrite")
    finally:
        first.send_signal(signal.SIGCONT)
    assert refused.returncode == 5
    assert "another run is writing" in refused.stderr
    assert first.ended().returncode == 0
    runs.invoke("verify", out, "--read-data", "--source", source)


@pytest.mark.parametrize(
    "name", ["backup/weights/p.safetensors", "weights/mine.safetensors", "experts/a.txt"]
)
def test_files_of_others_stay(source, converted, name):
    path = converted / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"years of work")
    with pytest.raises(OutputError, match="which moeconv did not write"):
        runs.run(source, converted, Wanted(tp=2), overwrite=True)
    assert path.read_bytes() == b"years of work"


@pytest.mark.parametrize("state", ["moeconv.json", ".moeconv/plan.json", ".moeconv/facts.json"])
def test_a_broken_note_can_be_overwritten(source, converted, tmp_path, state):
    expected = runs.run(source, tmp_path / "expected")
    (converted / state).parent.mkdir(exist_ok=True)
    (converted / state).write_text("{")
    runs.run(source, converted, overwrite=True)
    assert runs.tree(converted) == runs.tree(expected)


def test_overwrite_repairs_a_damaged_directory(source, tmp_path):
    out = tmp_path / "out"
    runs.invoke("trtllm", source, "--out", out)
    expected = runs.tree(out)
    (shard, *_) = runs.shards(out)
    data = bytearray((out / shard).read_bytes())
    data[-1] ^= 1
    (out / shard).write_bytes(data)
    runs.invoke("trtllm", source, "--out", out, "--overwrite")
    assert runs.tree(out) == expected
    (out / shard).unlink()
    again = runs.moeconv("trtllm", source, "--out", out)
    assert again.returncode == 6
    assert "is missing" in again.stderr
    assert "--overwrite" in again.stderr


@pytest.mark.parametrize(("rank", "size"), [("3", "1"), ("abc", "2"), ("", "1")])
def test_a_rank_that_is_none(source, tmp_path: Path, monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    done = runs.moeconv("trtllm", source, "--out", tmp_path / "out")
    assert done.returncode == 4
    assert "is no rank" in done.stderr
