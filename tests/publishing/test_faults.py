"""Conversions on their way to the Hub, through kills, refusals, stalls and lost races."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import runs
from tests.hub.state import FakeHub, Fault
from tests.publishing.pushes import (
    REPO,
    SHARDS,
    SIZE,
    check_same,
    push,
    refused,
    refused_push,
    repo,
    sent,
)


def test_what_was_sent_is_not_sent_again(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    out = tmp_path / "out"
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=3, status=403))
    error = refused_push(source, out, "--max-disk", "600kB")
    assert error.exit_code == 5
    assert "not allowed" in str(error)
    assert "moeconv.json" not in repo(hub)
    assert len(sent(hub)) == 3
    push(source, out, "--max-disk", "600kB")
    check_same(hub, plain)
    assert len(sent(hub)) == SHARDS, sent(hub)


def test_another_machine_goes_on(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=3, status=403))
    refused_push(source, tmp_path / "out", "--max-disk", "600kB")
    push(source, tmp_path / "elsewhere", "--max-disk", "600kB")
    check_same(hub, plain)
    assert len(sent(hub)) == SHARDS, sent(hub)


def test_a_kill_loses_nothing(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    out = tmp_path / "out"
    args = ("trtllm", source, "--out", out, *SIZE, "--push", REPO, "--max-disk", "600kB")
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=2, delay_s=20))
    process = runs.start("none", 0, *args)
    while len(sent(hub)) < 2:
        assert process.returncode is None
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.ended()
    hub.faults.clear()
    push(source, out, "--max-disk", "600kB")
    check_same(hub, plain)


def test_a_lost_race_is_said(hub: FakeHub, source: Path, tmp_path: Path):
    hub.store.new_repo(REPO)
    hub.faults.append(Fault("POST", "/commit/main", status=412))
    error = refused_push(source, tmp_path / "out")
    assert "somebody else has changed it" in str(error)
    push(source, tmp_path / "out")
    assert "moeconv.json" in repo(hub)


def test_a_lost_answer_is_no_second_commit(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    hub.faults.append(Fault("POST", "/commit/main", cut=0))
    push(source, tmp_path / "out")
    check_same(hub, plain)


@pytest.mark.parametrize("status", [429, 503])
def test_what_passes_is_waited_for(hub: FakeHub, source: Path, tmp_path: Path, status: int):
    hub.faults.append(Fault("POST", "/commit/", status=status, headers={"Retry-After": "0"}))
    push(source, tmp_path / "out")
    assert "moeconv.json" in repo(hub)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "token is not accepted"),
        (402, "no storage left"),
        (403, "not allowed"),
        (413, "too large"),
        (418, "the Hub answers 418"),
    ],
)
def test_what_stays_is_said_at_once(
    hub: FakeHub, source: Path, tmp_path: Path, status: int, words: str
):
    fault = Fault("POST", "/branch/", times=5, status=status)
    hub.faults.append(fault)
    error = refused_push(source, tmp_path / "out")
    assert words in str(error)
    assert error.hint
    assert not (tmp_path / "out").exists()
    assert fault.times == 4


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a connection up at once, and let neither the library nor us wait before the next."""
    from huggingface_hub.utils import _http

    from moeconv.output import hubcalls

    monkeypatch.setattr(hubcalls, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(hubcalls, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(_http, "time", SimpleNamespace(**{**vars(time), "sleep": lambda _s: None}))


@pytest.mark.usefixtures("short_patience")
def test_a_connection_on_which_nothing_moves_is_given_up(
    hub: FakeHub, source: Path, plain: Path, tmp_path: Path
):
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=1, cut=0, stall_s=2))
    push(source, tmp_path / "out")
    check_same(hub, plain)


@pytest.mark.usefixtures("short_patience")
def test_a_stall_without_end_is_said_and_gone_on_from(
    hub: FakeHub, source: Path, plain: Path, tmp_path: Path
):
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=3, times=99, cut=0, stall_s=2))
    error = refused_push(source, tmp_path / "out", "--max-disk", "600kB")
    assert "nothing moves for 0.3 s" in str(error)
    assert "what is sent is kept" in str(error.hint)
    assert "moeconv.json" not in repo(hub)
    hub.faults.clear()
    push(source, tmp_path / "out", "--max-disk", "600kB")
    check_same(hub, plain)
    assert len(sent(hub)) == SHARDS, sent(hub)


def test_no_token(hub: FakeHub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_TOKEN")
    error = refused_push(source, tmp_path / "out")
    assert "there is no token" in str(error)
    assert "hf auth login" in str(error.hint)
    assert not hub.log


def test_a_gitignore_that_drops_files_is_noticed(hub: FakeHub, source: Path, tmp_path: Path):
    hub.store.add(REPO, {".gitignore": b"*.safetensors\n"})
    hub.ignored = r"\.safetensors$"
    error = refused_push(source, tmp_path / "out")
    assert ".gitignore" in str(error.hint)
    assert "moeconv.json" not in repo(hub)


def test_a_damaged_shard_is_not_published(hub: FakeHub, plain: Path):
    shard = next(plain.glob("experts/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert "is damaged" in str(refused("push", plain, REPO))
    assert "moeconv.json" not in repo(hub)
