"""What streaming takes: memory, requests, and no disk for the source."""

from __future__ import annotations

from pathlib import Path

from tests import runs
from tests.hub.state import FakeHub
from tests.test_memory import peak_bytes, write_sparse

REPO = "Qwen/Tiny-MoE"
MB = 10**6


def test_memory_is_bounded(hub: FakeHub, tmp_path: Path):
    source = write_sparse(tmp_path / "large", 128)  # 2 layers, 128 experts, 3 × 0.5 MB each
    size = (source / "model.safetensors").stat().st_size
    hub.store.add_folder(REPO, source)
    before = len(hub.log)
    command = [*runs.COMMAND, "trtllm", REPO, "--out", str(tmp_path / "out"), "--device", "cpu"]
    peak = peak_bytes(*command, "--max-host-memory", "400MB")
    requests, tensors = len(hub.log) - before, 2 * 128 * 3
    print(f"{size / MB:.0f} MB in {requests} requests, peak {peak / MB:.0f} MB")
    assert size > 380 * MB
    assert peak < 400 * MB
    assert requests < 0.4 * tensors  # a third of each expert waits, as far as memory goes
    assert hub.sent_bytes < 1.01 * size
    assert not list((tmp_path / "hf-home").rglob("*"))


def test_a_layer_that_memory_holds_comes_in_few_requests(hub: FakeHub, tmp_path: Path):
    hub.store.add_folder(REPO, write_sparse(tmp_path / "large", 64))
    out = tmp_path / "out"
    done = runs.moeconv("trtllm", REPO, "--out", out, "--max-host-memory", "1GB", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(hub.seen("GET", "/cdn/")) < 2 * 64 * 3 // 8
