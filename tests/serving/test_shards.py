"""A file that is not the one of its name is refused before a byte of it is used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moeconv.errors import VerifyError
from moeconv.serving import open_converted
from tests import runs
from tests.runs import Wanted

Change = Callable[[Path, Path], None]


def exchange(shard: Path, other: Path) -> None:
    """Give two files each other's name, as a careless copy does."""
    aside = shard.with_suffix(".aside")
    shard.rename(aside)
    other.rename(shard)
    aside.rename(other)


def rewrite(shard: Path, _: Path) -> None:
    """Write the same tensors with a header of another tool's."""
    data = bytearray(shard.read_bytes())
    data[8:4096] = data[8:4096].replace(b'"moeconv plan"', b'"other writer"')
    shard.write_bytes(data)


def shorten(shard: Path, _: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)


def point(shard: Path, _: Path) -> None:
    """Leave what Git keeps in place of a large file."""
    shard.write_text("version https://git-lfs.github.com/spec/v1\n")


def empty(shard: Path, _: Path) -> None:
    shard.write_bytes(b"")


def remove(shard: Path, _: Path) -> None:
    shard.unlink()


def make_folder(shard: Path, _: Path) -> None:
    shard.unlink()
    shard.mkdir()


FIRST, SECOND = (rf"plan \w{{8}} with `model\.layers\.{layer}\.\S*` first" for layer in (0, 1))
NOBODY = "no plan of moeconv's"
CHANGES: dict[Change, str] = {
    exchange: rf"expected {FIRST}, \d+ bytes, found {SECOND}, \d+ bytes",
    rewrite: rf"expected {FIRST}, \d+ bytes, found {NOBODY} with `model\.layers\.0",
    shorten: r"\d+ bytes, found .*\d+ bytes",
    point: f"found {NOBODY}, 43 bytes",
    empty: f"found {NOBODY}, 0 bytes",
    remove: r"layers\.0.*` cannot be read: No such file",
    make_folder: r"layers\.0.*` (cannot be read|is not the file)",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_file_is_refused_before_memory_is_touched(converted, change):
    words = CHANGES[change]
    first, second = sorted((converted / "experts").iterdir())
    change(first, second)
    with open_converted(converted) as directory:
        view = directory.rank()
        outs = [np.full(tensor.nbytes, 0xA5, np.uint8) for tensor in view.tensors()]
        with pytest.raises(VerifyError, match=words):
            view.read_all(zip(view.tensors(), outs, strict=True))
        with pytest.raises(VerifyError, match=words):
            view.read_into(view.tensors()[0], outs[0])
    assert all((out == 0xA5).all() for out in outs)


def test_a_file_of_another_conversion_is_refused(source, converted, tmp_path):
    """Of the same names and sizes: some files of a fine-tune among those of its base."""
    (weights,) = source.glob("model-00001*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    other = runs.run(source, tmp_path / "other")
    shutil.copytree(other / "experts", converted / "experts", dirs_exist_ok=True)
    with open_converted(converted) as directory:
        view = directory.rank()
        outs = [np.empty(tensor.nbytes, np.uint8) for tensor in view.tensors()]
        with pytest.raises(VerifyError, match=rf"expected {FIRST}.*found {FIRST}") as error:
            view.read_all(zip(view.tensors(), outs, strict=True))
    assert "copy this file again" in str(error.value.hint)


def test_what_another_rank_reads_is_not_looked_at(source, tmp_path):
    """A rank may have only its own files: here those of the first half of the experts."""
    out = runs.run(source, tmp_path / "out", Wanted(max_shard_bytes=100_000))
    with open_converted(out) as directory:
        others = {tensor.file for tensor in directory.manifest.tensors if tensor.first >= 2}
        for name in others - {tensor.file for tensor in directory.manifest.tensors[:1]}:
            (out / name).unlink()
        view = directory.rank(ep_size=2, ep_rank=0)
        outs = [np.empty(tensor.nbytes, np.uint8) for tensor in view.tensors()]
        view.read_all(zip(view.tensors(), outs, strict=True))


def test_files_of_passed_tensors_are_compared_too(converted):
    with open_converted(converted) as directory:
        (weights,) = directory.weight_files()
    rewrite(weights, weights)
    with (
        open_converted(converted) as directory,
        pytest.raises(VerifyError, match="not the file that was written under this name"),
    ):
        directory.weight_files()


def test_a_manifest_with_an_unknown_dtype(converted):
    path = converted / "moeconv.json"
    manifest = json.loads(path.read_text())
    manifest["weights"][0]["dtype"] = "F7"
    path.write_text(json.dumps(manifest))
    with open_converted(converted) as directory, pytest.raises(VerifyError, match="dtype F7"):
        directory.weight_files()
