"""A shard is whole or not there, and the library reads it."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from moeconv.errors import OutputError
from moeconv.output.durable import write_file
from moeconv.output.shard import DATA_ALIGNMENT, ShardWriter, arrange
from moeconv.tensors import BITS, TensorSpec
from tests.sources import noise

specs = st.builds(
    TensorSpec, st.sampled_from(sorted(BITS)), st.lists(st.integers(0, 40), max_size=3).map(tuple)
).filter(lambda spec: spec.bits % 8 == 0)
tables = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name != "__metadata__"),
    specs,
    max_size=6,
)


def write(folder: Path, specs: dict[str, TensorSpec], piece: int = 1000) -> tuple[Path, str]:
    """Write a shard in pieces, as a conversion does."""
    layout = arrange(specs, {"format": "pt"})
    final = folder / "experts" / "a.safetensors"
    with ShardWriter(folder / "tmp" / "1", final, layout) as shard:
        for entry in layout.entries:
            data = np.frombuffer(noise(entry.name, entry.spec.nbytes), np.uint8)
            for at in range(0, data.size, piece):
                shard.write(entry.begin + at, data[at : at + piece])
                shard.digest(entry.begin + at, data[at : at + piece])
        return final, shard.commit()


@given(specs=tables, piece=st.integers(1, 5000))
def test_the_library_reads_what_is_written(specs, piece):
    with tempfile.TemporaryDirectory() as name:
        path, sha256 = write(Path(name), specs, piece)
        raw = path.read_bytes()
        assert hashlib.sha256(raw).hexdigest() == sha256
        with safe_open(path, framework="numpy") as oracle:
            assert set(oracle.keys()) == set(specs)
            assert oracle.metadata() == {"format": "pt"}
            for tensor, spec in specs.items():
                assert tuple(oracle.get_slice(tensor).get_shape()) == spec.shape
                assert oracle.get_slice(tensor).get_dtype() == spec.dtype
        for entry in arrange(specs, {"format": "pt"}).entries:
            assert raw[entry.begin : entry.end] == noise(entry.name, entry.spec.nbytes)


@given(specs=tables)
def test_data_and_tensors_are_aligned(specs):
    layout = arrange(specs, {"format": "pt"})
    assert len(layout.header) % DATA_ALIGNMENT == 0
    assert sum(spec.nbytes for spec in specs.values()) + len(layout.header) == layout.size
    for entry in layout.entries:
        if entry.spec.nbytes % 256 == 0:
            assert entry.begin % 256 == 0
    ends = [len(layout.header), *(entry.end for entry in layout.entries)]
    assert [entry.begin for entry in layout.entries] == ends[:-1], "a hole"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_mode_is_that_of_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        path, _ = write(tmp_path, {"a": TensorSpec("U8", (10,))})
        write_file(tmp_path / "b.json", (b"{}",), tmp_path / "tmp")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "b.json").stat().st_mode) == mode


def test_a_short_shard_is_not_committed(tmp_path):
    layout = arrange({"a": TensorSpec("U8", (10,))}, {})
    final = tmp_path / "a.safetensors"
    with (
        ShardWriter(tmp_path / "tmp" / "1", final, layout) as shard,
        pytest.raises(OutputError, match="is short: expected 4106 bytes, found 4096"),
    ):
        shard.commit()
    assert not final.exists()
    assert not list((tmp_path / "tmp").iterdir())


def test_nothing_is_left_of_an_abandoned_shard(tmp_path):
    layout = arrange({"a": TensorSpec("U8", (10,))}, {})
    with (
        pytest.raises(KeyboardInterrupt),
        ShardWriter(tmp_path / "tmp" / "1", tmp_path / "a.safetensors", layout),
    ):
        raise KeyboardInterrupt
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_folder_in_the_way_is_an_output_error(tmp_path):
    (tmp_path / "experts").write_text("a file")
    with pytest.raises(OutputError, match="cannot be written"):
        write(tmp_path, {"a": TensorSpec("U8", (1,))})


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_small_file_is_whole_or_as_it_was(tmp_path, monkeypatch, failing):
    path = tmp_path / "a.json"
    write_file(path, (b"old",), tmp_path / "tmp")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OutputError, match="No space left"):
        write_file(path, (b"new",), tmp_path / "tmp")
    assert [(p.name, p.read_bytes()) for p in tmp_path.rglob("*.json*")] == [("a.json", b"old")]


def test_a_rename_that_fails_leaves_nothing(tmp_path, monkeypatch):
    layout = arrange({"a": TensorSpec("U8", (4,))}, {})
    writer = ShardWriter(tmp_path / "grows", tmp_path / "whole", layout)
    (tmp_path / "whole").mkdir()  # a folder in the way

    def fill() -> None:
        with writer as shard:
            shard.write(layout.entries[0].begin, np.zeros(4, np.uint8))
            shard.digest(layout.entries[0].begin, np.zeros(4, np.uint8))
            shard.commit()

    with pytest.raises(OutputError):
        fill()
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
