"""Resident memory is bounded by the buffers, whatever the number of experts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moeconv.tensors import TensorSpec
from tests import runs
from tests.sources import Tiny, write_raw

# A process starts with the peak of the one that forked it, so a small one stands between.
MEASURE = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=sys.stderr)
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def peak_bytes(*command: str | Path) -> int:
    """Run a command and return its peak resident memory."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, command)],
        capture_output=True,
        text=True,
        check=True,
    )
    code, peak = map(int, done.stdout.split())
    assert code == 0, done.stderr
    return peak


def write_sparse(root: Path, experts: int) -> Path:
    """Write a checkpoint of 1.6 MB experts that takes no space on disk."""
    tiny = Tiny(experts=experts, hidden=512, intermediate=512, fill=lambda _name, _size: b"")
    table: dict[str, object] = {}
    at = 0
    for name, (dtype, shape, _) in tiny.tensors().items():
        end = at + TensorSpec(dtype, shape).nbytes
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    root.mkdir()
    path = root / "model.safetensors"
    write_raw(path, json.dumps(table).encode())
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + at)
    (root / "config.json").write_text(json.dumps(tiny.model_config()))
    return root


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, int]:
    """Peak memory of converting 2 layers of so many experts, on the CPU."""
    root = tmp_path_factory.mktemp("memory")
    found = {}
    for experts in (16, 64):
        source = write_sparse(root / str(experts), experts)
        command = [*runs.COMMAND, "trtllm", str(source), "--out", str(root / "out"), "--overwrite"]
        found[experts] = peak_bytes(*command, "--device", "cpu")
    print({experts: f"{peak / 1e6:.0f} MB" for experts, peak in found.items()})
    return found


def test_four_times_the_experts_take_no_more_memory(peaks):
    """CASES 2, in small."""
    assert abs(peaks[64] - peaks[16]) < 16_000_000


def test_less_than_torch_alone_and_300_mb(peaks):
    torch = peak_bytes(sys.executable, "-c", "import torch")
    print(f"torch alone: {torch / 1e6:.0f} MB")
    assert peaks[64] < torch + 300_000_000


def test_the_peak_that_is_told_is_its_own(source, tmp_path):
    """Also when the shell, or whatever started it, is large."""
    code = (
        "import subprocess, sys; ballast = b'x' * 500_000_000;"
        "sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    )
    command = [*runs.COMMAND, "trtllm", str(source), "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True
    )
    assert runs.json_lines(done.stdout)[-1]["peak_rss_bytes"] < 400_000_000
