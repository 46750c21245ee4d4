"""Config, index and shards: what is missing, stale, doubled or outside is said, never guessed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moeconv.checkpoint.index import open_checkpoint
from moeconv.errors import SourceError, UnsupportedError
from tests import runs
from tests.sources import write_safetensors

INDEX = "model.safetensors.index.json"


def edit_index(root: Path, **changes: str | None) -> None:
    """Change entries of the weight map; `None` removes one."""
    index = json.loads((root / INDEX).read_text())
    index["weight_map"].update(changes)
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file}
    (root / INDEX).write_text(json.dumps(index))


def shard(root: Path, number: int) -> Path:
    return sorted(root.glob("*.safetensors"))[number]


def test_a_sound_checkpoint_has_no_warnings(source):
    checkpoint = open_checkpoint(source)
    assert checkpoint.warnings == ()
    assert checkpoint.name == "source"
    assert checkpoint.side_files == ("config.json", "tokenizer.json")
    assert len(checkpoint.files) == 2


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_without_an_index_are_read(make_checkpoint, shards):
    checkpoint = open_checkpoint(make_checkpoint(index=False, shards=shards))
    assert len(checkpoint.files) == shards
    assert "model.norm.weight" in checkpoint.tensors


# CASES 1: converting twice would scramble the weights.


def test_a_converted_directory_is_refused(converted):
    before = runs.tree(converted)
    with pytest.raises(UnsupportedError, match="already converted"):
        open_checkpoint(converted)
    assert runs.tree(converted) == before


def test_a_half_finished_conversion_is_refused(source, tmp_path):
    next(runs.events(source, tmp_path / "out"))
    with pytest.raises(UnsupportedError, match="half-finished"):
        open_checkpoint(tmp_path / "out")


# CASES 19: index and shards contradict each other.


def test_a_shard_that_is_not_there_is_named(source):
    shard(source, 1).unlink()
    with pytest.raises(SourceError, match=r"2 shards, 1 of them not in .*`model-00002-of-00002"):
        open_checkpoint(source)


def test_a_tensor_that_no_shard_holds_is_named(source):
    edit_index(source, **{"model.ghost": shard(source, 0).name})
    with pytest.raises(SourceError, match=r"`model\.ghost`, expected in `model-00001-of-00002"):
        open_checkpoint(source)


def test_a_tensor_that_the_index_omits_is_kept_and_said(source, tmp_path):
    edit_index(source, **{"model.norm.weight": None})
    checkpoint = open_checkpoint(source)
    assert any("`model.norm.weight`; they are kept" in text for text in checkpoint.warnings)
    runs.run(source, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "moeconv.json").read_text())
    assert "model.norm.weight" in {entry["name"] for entry in manifest["weights"]}


def test_an_index_of_another_shard_count_is_refused(make_checkpoint):
    two, three = make_checkpoint("two"), make_checkpoint("three", shards=3)
    (two / INDEX).write_bytes((three / INDEX).read_bytes())
    with pytest.raises(SourceError, match="names 3 shards, 3 of them not in"):
        open_checkpoint(two)


def test_a_tensor_in_another_shard_is_reported(source):
    """CASES 26: a stale index is said; the bytes are where the headers say."""
    edit_index(source, **{"model.norm.weight": shard(source, 0).name})
    edit_index(source, **{"odd.bias": shard(source, 1).name})
    checkpoint = open_checkpoint(source)
    assert any("the index is stale" in text for text in checkpoint.warnings)


def test_a_shard_that_no_index_names_is_reported(source):
    write_safetensors(source / "stray.safetensors", {"x": ("U8", (1,), b"x")})
    checkpoint = open_checkpoint(source)
    assert "x" not in checkpoint.tensors
    assert any("`stray.safetensors`" in text for text in checkpoint.warnings)


# CASES 20: the same key in two shards.


@pytest.mark.parametrize("equal", [True, False])
def test_a_name_in_two_shards(make_checkpoint, equal):
    data = b"same" if equal else b"else"
    root = make_checkpoint(index=False, shards=1)
    for i, text in enumerate((b"same", data)):
        write_safetensors(root / f"z{i}.safetensors", {"twin": ("U8", (4,), text)})
    if equal:
        assert any("equal bytes" in text for text in open_checkpoint(root).warnings)
        return
    with pytest.raises(SourceError, match=r"`twin` is in .*z0.* and in .*z1.*different bytes"):
        open_checkpoint(root)


def test_a_name_in_two_shards_with_two_shapes_is_refused(make_checkpoint):
    root = make_checkpoint(index=False, shards=1)
    for i, shape in enumerate(((4,), (2, 2))):
        write_safetensors(root / f"z{i}.safetensors", {"twin": ("U8", shape, b"same")})
    with pytest.raises(SourceError, match="twin"):
        open_checkpoint(root)


# CASES 21: a shard shorter than its header says.


@pytest.mark.parametrize("cut", [1, 1024, 128 * 128 * 2], ids=["byte", "kilobyte", "tensor"])
def test_a_shard_cut_short_is_refused(source, cut):
    path = shard(source, 0)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(SourceError, match=rf"`{path.name}` is shorter than its header says"):
        open_checkpoint(source)


# CASES 22 and 23: odd offsets, odd headers, every dtype; raw bytes, never cast.


def test_unaligned_data_and_odd_headers_are_read(make_checkpoint, tmp_path):
    root = make_checkpoint(shards=1, extra={"a.odd": ("U8", (3,), b"odd")})
    tensors = open_checkpoint(root)
    (path,) = root.glob("*.safetensors")
    everything = {
        ref.name: (
            ref.spec.dtype,
            ref.spec.shape,
            path.read_bytes()[ref.begin : ref.begin + ref.spec.nbytes],
        )
        for ref in sorted(tensors.tensors.values(), key=lambda ref: ref.name)
    }
    expected = runs.run(root, tmp_path / "even")
    write_safetensors(path, everything, pad=5)  # `a.odd` first: all that follows is unaligned
    found = runs.run(root, tmp_path / "odd")
    assert runs.rank_bytes(found) == runs.rank_bytes(expected)


@pytest.mark.parametrize("dtype", ["F4", "F8_E8M0", "F8_E4M3", "I8", "F6_E2M3", "F64"])
def test_other_dtypes_pass_through_as_bytes(make_checkpoint, tmp_path, dtype):
    bits = {"F4": 4, "F6_E2M3": 6, "F64": 64}.get(dtype, 8)
    data = bytes(range(8 * bits // 8 * 4))
    root = make_checkpoint(extra={"model.scale": (dtype, (4, 8), data)})
    out = runs.run(root, tmp_path / "out")
    manifest = json.loads((out / "moeconv.json").read_text())
    (entry,) = (entry for entry in manifest["weights"] if entry["name"] == "model.scale")
    assert (entry["dtype"], entry["shape"]) == (dtype, [4, 8])
    assert (out / entry["file"]).read_bytes()[entry["begin"] : entry["end"]] == data


# CASES 24: names that lead out of the directory.


@pytest.mark.parametrize(
    "file", ["../evil.safetensors", "/etc/evil.safetensors", "a/../../b.safetensors", "model.bin"]
)
def test_a_file_outside_the_checkpoint_is_refused(source, file):
    edit_index(source, **{"model.norm.weight": file})
    with pytest.raises(SourceError, match="outside the checkpoint"):
        open_checkpoint(source)


# CASES 26: no weight index and no weight file is carried over.


def test_weights_and_their_indexes_are_no_side_files(source, tmp_path):
    for name in (
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "consolidated.00.pth",
        "original/consolidated.safetensors",
        "original/params.json",
        "onnx/model.onnx",
        ".cache/x.json",
        "modeling_tiny.py",
        "tf_model.h5.index.json",
        "old.safetensors.index.json",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    out = runs.run(source, tmp_path / "out")
    kept = {name for name in runs.tree(out) if not name.endswith(".safetensors")}
    assert not [name for name in kept if "index" in name]
    assert {"config.json", "tokenizer.json", "modeling_tiny.py", "original/params.json"} <= kept
    assert kept <= {"moeconv.json", *open_checkpoint(source).side_files}
    assert not {name for name in kept if name.startswith(".") or "onnx" in name}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", None, r"`config\.json` is not in"),
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", "[]", "holds no JSON object: found list"),
        ("config.json", "[" * 100_000, "cannot be read as JSON"),
        (INDEX, "{", "cannot be read as JSON"),
        (INDEX, "{}", "no `weight_map`"),
        (INDEX, '{"weight_map": {"a": 1}}', "no `weight_map`"),
    ],
    ids=["absent", "cut", "list", "deep", "index-cut", "index-empty", "index-numbers"],
)
def test_broken_json_is_a_source_error(source, name, text, words):
    (source / name).unlink()
    if text is not None:
        (source / name).write_text(text)
    with pytest.raises(SourceError, match=words):
        open_checkpoint(source)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(SourceError, match="is not a directory"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(UnsupportedError, match=r"no `\*\.safetensors` file, only `pytorch_model"):
        open_checkpoint(tmp_path)


def dangling(root: Path) -> None:
    (root / "gone.json").symlink_to(root / "nowhere")


def pipe(root: Path) -> None:
    os.mkfifo(root / "pipe.json")


def reserved(root: Path) -> None:
    (root / "experts").write_text("a file")


def unprintable(root: Path) -> None:
    (root / os.fsdecode(b"na\xefve.txt")).write_text("latin")


@pytest.mark.parametrize("make", [dangling, pipe, reserved, unprintable])
def test_a_side_file_that_cannot_be_kept_is_refused_first(source, make):
    make(source)
    with pytest.raises(SourceError, match="the side file `"):
        open_checkpoint(source)


def test_a_link_to_a_folder_above_ends(source):
    (source / "loop").symlink_to(source)
    assert "tokenizer.json" in open_checkpoint(source).side_files


def test_a_long_name_is_kept(source, tmp_path):
    name = "n" * 255
    (source / name).write_text("text")
    from tests import runs

    assert (runs.run(source, tmp_path / "out") / name).read_text() == "text"
