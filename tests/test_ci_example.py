"""The example for CI, against the Hub on loopback: machines that share nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.hub.state import FakeHub

FOLDER = Path(__file__).parents[1] / "examples" / "ci"


SOURCE, TARGET = "org/source", "org/converted"


def begin(machine: Path, source: str, *args: str) -> subprocess.Popen[str]:
    machine.mkdir()
    # `moeconv` is the one that is tested, wherever another is installed.
    command = machine / "bin" / "moeconv"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m moeconv "$@"\n')
    command.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(FOLDER.parents[1]),
        "SRC": source,
        "REPO": TARGET,
        "GITHUB_OUTPUT": str(machine / "output"),
        "MAX_SHARD_SIZE": "100kB",
        "MAX_DISK": "150kB",
    }
    return subprocess.Popen(
        ["bash", FOLDER / "publish.sh", *args],
        cwd=machine,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    return said


def jobs() -> dict[str, Any]:
    """Return the jobs of the workflow."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / "publish.yml").read_text())["jobs"]
    return found


def steps() -> dict[str, list[str]]:
    """Return what the workflow calls the script with, a job each."""
    called = {}
    for name, job in jobs().items():
        line = job["steps"][-1]["run"]
        parts = job.get("strategy", {"matrix": {"part": [""]}})["matrix"]["part"]
        args = line.partition("publish.sh ")[2]
        called[name] = [args.replace("${{ matrix.part }}", part) for part in parts]
    return called


def test_parts_of_several_machines_become_a_model(hub: FakeHub, source: Path, tmp_path: Path):
    commit = hub.store.add_folder(SOURCE, source).oid
    called = steps()
    said = end(begin(tmp_path / "pin", SOURCE, *called["pin"][0].split()))
    assert "a new repository" in " ".join(said.split())
    key, _, pinned = (tmp_path / "pin" / "output").read_text().strip().partition("=")
    assert pinned == f"{SOURCE}@{commit}"
    assert jobs()["pin"]["outputs"] == {key: f"${{{{ steps.pin.outputs.{key} }}}}"}
    assert not hub.store.repos.get(TARGET)
    hub.store.add(SOURCE, {"new.txt": b"new"})  # meanwhile
    *most, lost = called["parts"]  # one machine never gets to it
    running = [begin(tmp_path / str(i), pinned, *part.split()) for i, part in enumerate(most)]
    for process in running:
        end(process)
    assert lost
    assert "moeconv.json" not in hub.store.repos[TARGET].head.tree
    before = len(hub.seen("PUT", "/lfs-store/"))
    assert before >= len(most)
    said = end(begin(tmp_path / "last", pinned, *called["whole"][0].split()))
    assert "has the files and headers its manifest says" in said
    assert f"`{SOURCE}` has the" in said
    tree = hub.store.repos[TARGET].head.tree
    shards = [path for path in tree if path.endswith(".safetensors")]
    assert len(hub.seen("PUT", "/lfs-store/")) == len(shards)
    assert list(hub.store.repos[TARGET].refs) == ["main"]
    assert not list(tmp_path.glob("*/build/converted/**/*.safetensors"))
    assert not list((tmp_path / "hf-home").rglob("*.safetensors"))
