"""The line: what it yields, what lies on disk after each step, and that bytes stay bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moeconv.conversion.budget import Limits
from moeconv.conversion.convert import convert
from moeconv.conversion.pipeline import Moved
from moeconv.output.directory import OutputDirectory
from moeconv.output.manifest import Manifest
from moeconv.output.records import ShardRecord
from tests import runs
from tests.runs import Wanted

ENGINES_LOOK_FOR = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json", "*.gguf")


def weights_at_the_top(out: Path) -> list[str]:
    return [path.name for pattern in ENGINES_LOOK_FOR for path in out.glob(pattern)]


def test_no_engine_finds_weights_at_any_time(source, tmp_path):
    """vLLM and SGLang look for these at the top level only, and stop where there are none."""
    (source / "pytorch_model.bin").write_bytes(b"old")
    (source / "consolidated.00.pth").write_bytes(b"old")
    out = tmp_path / "out"
    seen = 0
    for event in runs.events(source, out, Wanted(max_shard_bytes=100_000)):
        assert not weights_at_the_top(out)
        assert (out / "moeconv.json").exists() == isinstance(event, Manifest)
        seen += 1
    assert seen > 10
    assert not weights_at_the_top(out)


def test_events_add_up(source, tmp_path):
    plan, _ = runs.plan(source)
    events = list(runs.events(source, tmp_path / "out"))
    assert sum(event.nbytes for event in events if isinstance(event, Moved)) == plan.nbytes
    assert [e.file for e in events if isinstance(e, ShardRecord)] == [j.file for j in plan.jobs]
    assert isinstance(events[-1], Manifest)
    run = events[-1].run
    assert run.bytes_written == plan.nbytes
    assert run.bytes_read >= plan.nbytes
    assert run.seconds > 0
    assert run.peak_rss_bytes > 10**7
    assert run.peak_device_bytes == 0


@pytest.mark.parametrize("workers", [1, 2, 5, 9])
@pytest.mark.parametrize("max_shard_bytes", [100_000, 10**9])
def test_workers_make_no_difference(source, tmp_path, workers, max_shard_bytes):
    """Nor do the shards that are filled at once: two for five workers, four for nine."""
    wanted = Wanted(max_shard_bytes=max_shard_bytes)
    expected = runs.run(source, tmp_path / "expected", wanted)
    events = list(runs.events(source, tmp_path / "out", wanted, workers=workers))
    assert runs.tree(tmp_path / "out") == runs.tree(expected)
    run = next(event for event in events if isinstance(event, Manifest)).run
    assert run.bytes_written == runs.plan(source, wanted)[0].nbytes


def test_each_kernel_set_writes_the_same_files(source, converted, tmp_path, fast_kernels):
    plan, checkpoint = runs.plan(source)
    out = tmp_path / "out"
    directory = OutputDirectory(out, plan.id, plan.identity)
    for _ in convert(plan, checkpoint, directory, fast_kernels, Limits(2, 1 << 30)):
        pass
    assert runs.tree(out) == runs.tree(converted)


def test_nan_payloads_survive(make_checkpoint, tmp_path):
    """Every BF16 pattern, signalling NaNs too, goes through unchanged."""
    patterns = np.arange(1 << 16, dtype=np.uint16).tobytes()

    def fill(name: str, size: int) -> bytes:
        return (patterns * (size // len(patterns) + 1))[:size]

    out = runs.run(make_checkpoint(hidden=256, intermediate=256, fill=fill), tmp_path / "out")
    for data in runs.rank_bytes(out).values():
        found = np.bincount(np.frombuffer(data, np.uint16), minlength=1 << 16)
        assert (found == found[0]).all()


def test_side_files_are_as_they_were(source, tmp_path):
    (source / "sub").mkdir()
    (source / "sub" / "template.jinja").write_bytes(b"\x00\xff raw")
    out = runs.run(source, tmp_path / "out")
    for name in ("config.json", "tokenizer.json", "sub/template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_the_config_says_nothing_of_the_conversion(source, converted):
    assert json.loads((converted / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
