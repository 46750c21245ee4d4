"""Publish a tiny model, and look at what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from moeconv.cli import app
from moeconv.errors import MoeconvError
from tests import runs
from tests.hub.state import FakeHub

REPO = "org/converted"
CARD = "---\nlicense: mit\nlanguage:\n- en\nlibrary_name: transformers\n---\n# Tiny\n"
SIZE = ("--max-shard-size", "500kB")
"""A layer of four experts is 786 kB, so that it makes two shards; the rest makes another."""
SHARDS = 6


def push(source: Path, out: Path, *args: str) -> str:
    return runs.invoke("trtllm", source, "--out", out, *SIZE, "--push", REPO, *args)


def dry(source: Path, out: Path, *args: str) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(
        push(source, out, "--dry-run", "--json", *args).split("\n")[-2]
    )
    return plan


def refused(*args: str | Path) -> MoeconvError:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert isinstance(result.exception, MoeconvError), result.output
    return result.exception


def refused_push(source: Path, out: Path, *args: str) -> MoeconvError:
    return refused("trtllm", source, "--out", out, *SIZE, "--push", REPO, *args)


def repo(hub: FakeHub, ref: str = "main") -> dict[str, bytes]:
    commit = hub.store.repos[REPO].find(ref)
    assert commit is not None
    return {path: hub.store.read(REPO, path, ref) for path in commit.tree}


def sent(hub: FakeHub) -> list[str]:
    return [seen.path for seen in hub.seen("PUT", "/lfs-store/") if seen.status == 200]


def check_same(hub: FakeHub, plain: Path, ref: str = "main") -> None:
    """Compare the repository with a conversion that stayed on disk."""
    there, here = repo(hub, ref), runs.tree(plain)
    del there["README.md"], there[".gitattributes"]
    manifest = {**json.loads(there.pop("moeconv.json")), "run": None, "run_digest": None}
    assert manifest == here.pop("moeconv.json")
    assert there == here
