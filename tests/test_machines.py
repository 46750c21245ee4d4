"""Machines that share nothing but a repository make what one machine makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import runs
from tests.fp4.models import Model
from tests.hub.state import FakeHub

SOURCE, TARGET = "org/source", "org/converted"
SIZE = ("--max-shard-size", "400kB")
MODEL = Model("modelopt", layers=4)


def convert(out: Path, *args: str) -> None:
    runs.invoke("marlin-fp4", SOURCE, "--out", out, *SIZE, "--push", TARGET, *args)


def published(hub: FakeHub) -> dict[str, object]:
    files: dict[str, object] = {
        path: hub.store.read(TARGET, path) for path in hub.store.repos[TARGET].head.tree
    }
    del files["README.md"]
    files["moeconv.json"] = {
        **json.loads(hub.store.read(TARGET, "moeconv.json")),
        "run": None,
        "run_digest": None,
    }
    return files


def read_bytes(hub: FakeHub, since: int) -> int:
    return sum(seen.sent for seen in hub.log[since:] if seen.path.startswith("/cdn/"))


@pytest.mark.parametrize("parts", [2, 3])
def test_scales_are_looked_at_once_and_the_bytes_are_those_of_one_machine(
    hub: FakeHub, tmp_path: Path, parts: int
):
    source = MODEL.write(tmp_path / "source")
    hub.store.add_folder(SOURCE, source)
    convert(tmp_path / "alone")
    alone = published(hub)
    del hub.store.repos[TARGET]
    for part in range(1, parts + 1):
        convert(tmp_path / f"{part}", "--shard-of", f"{part}/{parts}", "--max-disk", "900kB")
        assert "moeconv.json" not in hub.store.repos[TARGET].head.tree
    since = len(hub.log)
    convert(tmp_path / "join", "--max-disk", "900kB")
    assert published(hub) == alone
    assert list(hub.store.repos[TARGET].refs) == ["main"]
    headers = 2 * (1 << 17)  # of two files
    assert read_bytes(hub, since) <= headers  # neither scales nor weights
    assert len(hub.seen("GET", r"/facts\.json")) == parts
