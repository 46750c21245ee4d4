"""What a process may have or name at most: shards, tensors, open files, characters of a name.

The headers of a large checkpoint are written, its data are holes, so that it takes no space.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moeconv.tensors import TensorSpec
from tests import runs
from tests.sources import Tiny, write_raw, write_tiny
from tests.test_memory import MEASURE

LARGE = Tiny(experts=512, layers=130, hidden=64, intermediate=64, shards=2_000)
"""With 3 projections: 199,680 tensors, and 133 beside them."""

SMALL = Tiny(experts=40, layers=2, hidden=64, intermediate=64, shards=100)
MOST_FILES = 64


def write_wide(root: Path, tiny: Tiny) -> Path:
    """Write headers and holes, tensors dealt out over the shards."""
    tensors = Tiny(
        tiny.experts, tiny.hidden, tiny.intermediate, tiny.layers, fill=lambda _name, _size: b""
    ).tensors()
    names = list(tensors)
    weight_map = {}
    root.mkdir()
    for number in range(tiny.shards):
        file = f"model-{number + 1:05}-of-{tiny.shards:05}.safetensors"
        inside = names[number :: tiny.shards]
        weight_map.update(dict.fromkeys(inside, file))
        table: dict[str, object] = {}
        at = 0
        for name in inside:
            dtype, shape, _ = tensors[name]
            end = at + TensorSpec(dtype, shape).nbytes
            table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        write_raw(root / file, json.dumps(table).encode())
        os.truncate(root / file, (root / file).stat().st_size + at)
    (root / "config.json").write_text(json.dumps(tiny.model_config()))
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return root


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(*args: str | Path) -> tuple[float, int]:
    """Run the command; return its seconds of processor time and its peak memory, in bytes."""
    command = [sys.executable, "-c", MEASURE, *runs.COMMAND, *map(str, args)]
    before_s = _children_s()
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    took_s = _children_s() - before_s
    code, peak = map(int, done.stdout.split())
    assert code == 0, done.stderr
    return took_s, peak


@pytest.mark.slow
def test_two_thousand_shards(tmp_path: Path, record: Callable[[str, int, str], None]):
    source, out = write_wide(tmp_path / "source", LARGE), tmp_path / "out"
    to_out = ("trtllm", source, "--out", out, "--device", "cpu")
    measured(*to_out, "--max-shard-size", "800kB")
    assert len(list(out.rglob("*.safetensors"))) > LARGE.shards
    looks: dict[str, tuple[str | Path, ...]] = {
        "inspect": ("inspect", source),
        "--dry-run": (*to_out[:3], tmp_path / "other", "--device", "cpu", "--dry-run"),
        "verify": ("verify", out),
    }
    for name, args in looks.items():
        took_s, peak = measured(*args)
        what = f"`{name}`, 2,000 shards with 200,000 tensors"
        record(what, 1, f"{took_s:.1f} s of processor time, at most {peak / 1e6:.0f} MB of memory")
        assert peak < 1_000_000_000


def limited(*args: str | Path) -> str:
    """Run the command where few files may be open; return what it says."""
    done = subprocess.run(
        [*runs.COMMAND, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, MOST_FILES)),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_more_shards_than_files_may_be_open(tmp_path):
    """Of the source, of the output, of what is restored, and of what a rank reads."""
    source, out, back = write_wide(tmp_path / "source", SMALL), tmp_path / "out", tmp_path / "back"
    small = ("--max-shard-size", "30kB", "--workers", "8", "--device", "cpu")
    limited("trtllm", source, "--out", out, *small)
    assert len(list(out.rglob("*.safetensors"))) > MOST_FILES
    limited("verify", out, "--read-data")
    limited("restore", out, "--out", back, "--device", "cpu")
    assert runs.tree(back) == runs.tree(source)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 40, before[1]))
    try:
        assert len(runs.rank_bytes(out)) == 2 * SMALL.layers
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_names_as_long_as_a_disk_takes(tmp_path):
    """Of shards, side files and folders: 255 bytes each; then a path near 4096."""
    deep = tmp_path
    while len(str(deep)) + 201 < 4096 - 600:
        deep /= "d" * 200
    deep.mkdir(parents=True)
    source = write_tiny(deep / "source", Tiny(experts=2, layers=1, shards=1))
    (shard,) = source.glob("*.safetensors")
    name = "s" * (255 - len(".safetensors")) + ".safetensors"
    shard.rename(source / name)
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard.name, name))
    (source / ("é" * 127)).write_text("text")
    out, back = deep / "out", deep / "back"
    for args in (
        ("inspect", source),
        ("trtllm", source, "--out", out, "--device", "cpu"),
        ("verify", out, "--read-data"),
        ("restore", out, "--out", back, "--device", "cpu"),
    ):
        runs.invoke(*args)
    assert runs.tree(back) == runs.tree(source)


def test_a_path_that_gets_too_long_on_the_way_is_refused_in_words(source, tmp_path):
    """The directory can be made, the files in it cannot."""
    deep = tmp_path
    while len(str(deep)) + 101 < 4096 - 45:
        deep /= "d" * 100
    deep /= "d" * (4096 - 45 - len(str(deep)))
    done = runs.moeconv("trtllm", source, "--out", deep)
    assert done.returncode == 5
    assert "File name too long" in done.stderr
    assert "Traceback" not in done.stderr
