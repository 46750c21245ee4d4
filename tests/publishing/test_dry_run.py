"""A dry run of publishing finds what publishing would, and sends nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moeconv.cli import app
from tests import runs
from tests.hub.state import FakeHub, Fault
from tests.publishing.pushes import (
    REPO,
    SHARDS,
    SIZE,
    dry,
    push,
    refused_push,
)


def test_a_dry_run_sends_nothing(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    shown = json.loads(runs.invoke("push", plain, REPO, "--dry-run", "--json"))
    assert (shown["shards_to_send"], shown["shards_there"]) == (SHARDS, 0)
    assert not [seen for seen in hub.log if seen.method != "GET"]
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=3, status=403))
    refused_push(source, tmp_path / "out", "--max-disk", "600kB")
    shown = json.loads(runs.invoke("push", plain, REPO, "--dry-run", "--json"))
    assert (shown["shards_to_send"], shown["shards_there"]) == (SHARDS - 3, 3)


def test_a_dry_run_of_what_is_published(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    runs.invoke("push", plain, REPO)
    shown = json.loads(runs.invoke("push", plain, REPO, "--dry-run", "--json"))
    assert (shown["shards_to_send"], shown["bytes_to_send"]) == (0, 0)
    assert (shown["shards_there"], shown["was_there"]) == (SHARDS, True)
    assert dry(source, tmp_path / "out")["push"]["was_there"]
    assert "nothing is left to do" in push(source, tmp_path / "out", "--dry-run")


def test_a_dry_run_of_a_conversion_says_where_it_goes(hub: FakeHub, source: Path, tmp_path: Path):
    plan = dry(source, tmp_path / "out", "--max-disk", "900kB")
    assert not plan["push"]["is_there"]
    assert plan["disk_bytes"] == 900_000 < plan["expert_bytes"]
    said = push(source, tmp_path / "out", "--dry-run", "--max-disk", "900kB")
    assert "a new repository" in said
    assert "at most 900.0 kB of" in " ".join(said.split())
    assert not hub.store.repos
    commit = hub.store.new_repo(REPO).head.oid
    assert dry(source, tmp_path / "out")["push"]["at"] == commit
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=3, status=403))
    refused_push(source, tmp_path / "out", "--max-disk", "600kB")
    assert "3 shards, from earlier runs" in push(source, tmp_path / "elsewhere", "--dry-run")
    assert not [seen for seen in hub.log if seen.method == "DELETE"]


@pytest.mark.parametrize(
    ("change", "args", "words"),
    [
        ("foreign", (), "this is not allowed"),
        ("public", ("--private",), "is public"),
        ("weights", (), "`model.safetensors`"),
        ("", ("--max-disk", "300kB"), "does not hold `experts/"),
    ],
)
def test_a_dry_run_finds_what_publishing_would(
    hub: FakeHub, source: Path, tmp_path: Path, change: str, args: tuple[str, ...], words: str
):
    hub.store.new_repo(REPO).foreign = change == "foreign"
    if change == "weights":
        hub.store.add(REPO, {"model.safetensors": b"theirs"})
    command = ["trtllm", source, "--out", tmp_path / "out", *SIZE, "--push", REPO, "--dry-run"]
    result = CliRunner().invoke(app, [str(arg) for arg in (*command, *args)])
    assert result.exit_code == 5
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
