"""From the Hub to the Hub through a disk that is a part of the model; takes gigabytes.

python -m pytest -m slow -s tests/test_small_disk.py

The Hub is a process of its own; its disk does not count, and neither does its memory. With
`-m bench` and MOECONV_RECORD naming a file, the 6 GB are measured and the figures are kept there.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moeconv.bench.checkpoint import KINDS, write_checkpoint
from moeconv.bench.shapes import Shape
from tests import runs
from tests.test_memory import MEASURE
from tests.watching import Disk

SHAPE = Shape("small", experts=128, hidden=2048, intermediate=768)
MB = 10**6
DISK, SHARD, MEMORY = 2000 * MB, 500 * MB, 300 * MB
SOURCE, TARGET = "org/source", "org/converted"
BUFFERS = ("--max-host-memory", "96MB", "--device", "cpu")

DOWNLOAD = """
from huggingface_hub import HfApi, get_hf_file_metadata, get_session, hf_hub_url
for file in HfApi().list_repo_tree("org/source"):
    where = get_hf_file_metadata(hf_hub_url("org/source", file.path)).location
    with get_session().stream("GET", where) as response:
        assert sum(map(len, response.iter_raw())) == file.size or file.lfs is None
"""
"""Every byte of the source into memory and away, by the library's client."""

UPLOAD = """
import pathlib, sys
from huggingface_hub import CommitOperationAdd, HfApi
api, done = HfApi(), []
api.create_repo("org/copy")
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    operation = CommitOperationAdd(f"{path.name}.safetensors", path)
    operation.upload_info.sha256 = bytes.fromhex(path.name)
    api.preupload_lfs_files("org/copy", [operation])
    done.append(operation)
api.create_commit("org/copy", done, commit_message="all")
"""
"""The shards of the result, whose SHA-256 are known, a file after the other, and one commit."""


@contextmanager
def hub(root: Path, source: Path, home: Path) -> Iterator[dict[str, str]]:
    """Run the Hub in a process of its own; yields what its clients must find set."""
    command = [sys.executable, "-m", "tests.hub.server", str(root), f"{SOURCE}={source}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = dict(pair.split("=", 1) for pair in server.stdout.readline().split())
        try:
            yield {**os.environ, **said, "HF_HOME": str(home)}
        finally:
            server.kill()


def run(env: dict[str, str], *command: str | Path) -> tuple[float, int]:
    """Run a command; return its seconds and its peak memory, in bytes."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, command)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    code, peak = map(int, done.stdout.split())
    assert code == 0, done.stderr
    return time.perf_counter() - started, peak


def measure(root: Path, source: Path) -> dict[str, float]:
    """Convert from the Hub to the Hub; then bring the same bytes down, and up, and nothing else."""
    machine, sent = root / "machine", root / "sent"
    args = ("--push", TARGET, "--max-disk", str(DISK), "--max-shard-size", str(SHARD), *BUFFERS)
    with hub(root / "hub", source, machine / "home") as env, Disk(machine) as disk:
        command = (*runs.COMMAND, "trtllm", SOURCE, "--out", machine / "out", *args)
        seconds, peak = run(env, *command)
        most = disk.most_bytes
        run(env, *runs.COMMAND, "verify", TARGET)
    assert not list(machine.rglob("*.safetensors"))
    sent.mkdir()
    for blob in (root / "hub" / "blobs").iterdir():
        if not blob.is_symlink() and len(blob.name) == 64:  # the source's are links
            blob.rename(sent / blob.name)
    shutil.rmtree(root / "hub")
    with hub(root / "other", source, machine / "home") as env:
        down, _ = run(env, sys.executable, "-c", DOWNLOAD)
        up, _ = run(env, sys.executable, "-c", UPLOAD, sent)
    shutil.rmtree(root)
    return {"seconds": seconds, "down": down, "up": up, "disk": most, "memory": peak}


@pytest.mark.parametrize(
    ("size", "rounds"),
    [
        pytest.param(1, 1, id="1GB", marks=pytest.mark.slow),
        pytest.param(6, 2, id="6GB", marks=pytest.mark.bench),
    ],
)
def test_disk_and_memory_stay_below_their_bounds(tmp_path: Path, size: int, rounds: int):
    source = tmp_path / "source"
    nbytes = write_checkpoint(source, KINDS["trtllm-bf16"], SHAPE, size * 1000 * MB)
    found = [measure(tmp_path / str(number), source) for number in range(rounds)]
    for it in found:
        print(f"\n{nbytes / MB:.0f} MB:", {name: round(value, 1) for name, value in it.items()})
    if "MOECONV_RECORD" in os.environ:
        figures = {
            "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
            "bytes": nbytes,
            "max_disk": DISK,
            "max_shard": SHARD,
            "runs": found,
        }
        Path(os.environ["MOECONV_RECORD"]).write_text(json.dumps(figures, indent=1) + "\n")
    for it in found:
        assert SHARD / 2 < it["disk"] <= DISK
        assert it["memory"] < MEMORY
