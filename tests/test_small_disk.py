"""A conversion through a disk that is a part of it, to a Hub in another process; takes gigabytes.

python -m pytest -m slow -s tests/test_small_disk.py
"""

from __future__ import annotations

import os
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
GB = 10**9
DISK, SHARD = 2 * GB, 500_000_000

UPLOAD = """
import sys
from huggingface_hub import HfApi
HfApi().create_repo("org/copy")
HfApi().upload_folder(repo_id="org/copy", folder_path=sys.argv[1])
"""


@contextmanager
def hub(root: Path) -> Iterator[dict[str, str]]:
    """Run the Hub in a process of its own; yields what its clients must find set."""
    command = [sys.executable, "-m", "tests.hub.server", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = dict(pair.split("=", 1) for pair in server.stdout.readline().split())
        try:
            yield {**os.environ, **said, "HF_HOME": str(root / "home")}
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [pytest.param(1, id="1GB"), pytest.param(6, id="6GB", marks=pytest.mark.bench)]
)
def test_disk_and_memory_stay_below_their_bounds(tmp_path: Path, size: int):
    source, out, plain = tmp_path / "source", tmp_path / "out", tmp_path / "plain"
    write_checkpoint(source, KINDS["trtllm-bf16"], SHAPE, size * GB)
    small = ("--max-shard-size", str(SHARD), "--max-host-memory", "64MB", "--device", "cpu")
    command = (*runs.COMMAND, "trtllm", source, *small)
    with hub(tmp_path / "hub") as env, Disk(out) as disk:
        args = ("--out", out, "--push", "org/converted", "--max-disk", str(DISK))
        seconds, peak = run(env, *command, *args)
    print(f"\n{size} GB: {seconds:.1f} s, disk {disk.most_bytes:,}, memory {peak:,} bytes")
    assert SHARD / 2 < disk.most_bytes <= DISK
    assert not list(out.rglob("*.safetensors"))
    if size > 1:
        return
    with hub(tmp_path / "other") as env:
        converting, least = run(env, *command, "--out", plain)
        sending, _ = run(env, sys.executable, "-c", UPLOAD, plain)
    print(f"apart: {converting:.1f} s to convert, {sending:.1f} s to send; memory {least:,} bytes")
    assert peak < least + 100_000_000
