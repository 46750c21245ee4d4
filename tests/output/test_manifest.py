"""The manifest says what is on disk, in whole bytes, and is read strictly."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import xxhash

from moeconv.errors import SourceError, VerifyError
from moeconv.output.codec import decode, encode, read_manifest
from tests import runs
from tests.runs import Wanted


def test_every_file_is_there_with_its_size_and_digest(converted):
    manifest = read_manifest(converted)
    files = {name: data for name, data in runs.tree(converted).items() if name != "moeconv.json"}
    assert {entry.path for entry in manifest.files} == files.keys()
    for entry in manifest.files:
        assert entry.size == len(files[entry.path])
        assert entry.sha256 == hashlib.sha256(files[entry.path]).hexdigest()


@pytest.mark.parametrize(
    "wanted", [Wanted(), Wanted(tp=2), Wanted(max_shard_bytes=100_000)], ids=str
)
def test_every_expert_has_its_digest(source, tmp_path, wanted):
    out = runs.run(source, tmp_path / "out", wanted)
    for entry in read_manifest(out).tensors:
        data = (out / entry.file).read_bytes()[entry.begin : entry.end]
        count = entry.last - entry.first + 1
        assert entry.shape[0] == count
        assert len(entry.xxh3) == count
        each = len(data) // count
        for i, digest in enumerate(entry.xxh3):
            assert digest == xxhash.xxh3_128_hexdigest(data[i * each : (i + 1) * each])


@pytest.mark.parametrize("storage", ["per-expert", "stacked", "transposed", "plain"])
def test_every_source_byte_has_passed_once(make_checkpoint, tmp_path, storage):
    """Digests of source ranges and of passed tensors together cover every source tensor."""
    root = make_checkpoint(storage=storage)
    _, checkpoint = runs.plan(root)
    manifest = read_manifest(runs.run(root, tmp_path / "out"))
    covered: dict[str, set[tuple[int, int]]] = {}
    for digest in manifest.sources:
        ref = checkpoint.tensors[digest.name]
        data = (root / ref.file).read_bytes()[ref.begin + digest.begin : ref.begin + digest.end]
        assert xxhash.xxh3_128_hexdigest(data) == digest.xxh3
        covered.setdefault(digest.name, set()).add((digest.begin, digest.end))
    for entry in manifest.weights:
        covered[entry.name] = {(0, entry.end - entry.begin)}
    assert covered.keys() == checkpoint.tensors.keys()
    for name, ranges in covered.items():
        ends = [0, *(end for _, end in sorted(ranges))]
        assert [begin for begin, _ in sorted(ranges)] == ends[:-1]
        assert ends[-1] == checkpoint.tensors[name].spec.nbytes


def test_it_is_the_same_after_a_round_trip(converted):
    data = (converted / "moeconv.json").read_bytes()
    assert encode(read_manifest(converted)) == data


def test_two_conversions_have_equal_manifests(source, converted, tmp_path):
    assert runs.tree(runs.run(source, tmp_path / "again")) == runs.tree(converted)


def change(root: Path, **fields: object) -> None:
    path = root / "moeconv.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"format": 2}, "has format 2, expected 1"),
        ({"tensors": None}, r"\$\.tensors"),
        ({"layout": {}}, r"\$\.layout"),
    ],
    ids=str,
)
def test_a_broken_manifest_is_refused(converted, fields, words):
    change(converted, **fields)
    with pytest.raises(VerifyError, match=words):
        read_manifest(converted)


def test_what_a_later_version_adds_is_let_through(converted):
    change(converted, added_later=[1, 2])
    assert read_manifest(converted).format == 1


def test_no_manifest_no_model(tmp_path):
    with pytest.raises(SourceError, match=r"`moeconv\.json` is not in"):
        read_manifest(tmp_path)
    (tmp_path / ".moeconv").mkdir()
    with pytest.raises(SourceError) as error:
        read_manifest(tmp_path)
    assert "run the same `moeconv` command again" in str(error.value.hint)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[" * 100_000, b"\xff"], ids=["", "cut", "deep", "raw"]
)
def test_broken_json_is_a_verify_error(text):
    with pytest.raises(VerifyError, match="cannot be read"):
        decode(text, dict[str, str], "x.json")
