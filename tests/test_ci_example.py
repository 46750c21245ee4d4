"""The example for CI, against the Hub on loopback: machines that share nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.hub.state import FakeHub

FOLDER = Path(__file__).parents[1] / "examples" / "ci"


def begin(machine: Path, source: Path, *args: str) -> subprocess.Popen[str]:
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
        "SRC": str(source),
        "REPO": "org/converted",
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


def steps() -> dict[str, list[str]]:
    """Return what the workflow calls the script with, a job each."""
    jobs = yaml.safe_load((FOLDER / "publish.yml").read_text())["jobs"]
    called = {}
    for name, job in jobs.items():
        line = job["steps"][-1]["run"]
        parts = job.get("strategy", {"matrix": {"part": [""]}})["matrix"]["part"]
        args = line.partition("publish.sh ")[2]
        called[name] = [args.replace("${{ matrix.part }}", part) for part in parts]
    return called


def test_parts_of_several_machines_become_a_model(hub: FakeHub, source: Path, tmp_path: Path):
    called = steps()
    *most, lost = called["parts"]  # one machine never gets to it
    running = [begin(tmp_path / str(i), source, *part.split()) for i, part in enumerate(most)]
    for process in running:
        end(process)
    assert lost
    assert "moeconv.json" not in hub.store.repos["org/converted"].head.tree
    before = len(hub.seen("PUT", "/lfs-store/"))
    assert before >= len(most)
    said = end(begin(tmp_path / "last", source, *called["whole"][0].split()))
    assert "has the files and headers its manifest says" in said
    tree = hub.store.repos["org/converted"].head.tree
    shards = [path for path in tree if path.endswith(".safetensors")]
    assert len(hub.seen("PUT", "/lfs-store/")) == len(shards)
    assert list(hub.store.repos["org/converted"].refs) == ["main"]
    assert not list(tmp_path.glob("*/build/converted/**/*.safetensors"))
