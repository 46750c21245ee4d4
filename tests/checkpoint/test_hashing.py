"""Which digest a source file has, and where it is from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

import moeconv
from moeconv.errors import SourceError, VerifyError
from moeconv.output.codec import read_manifest
from moeconv.output.manifest import Manifest
from moeconv.sourcing import open_source
from tests import runs
from tests.hub.state import FakeHub


def test_a_pass_over_the_source_gives_the_digest_of_each_file(source: Path, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    runs.invoke("trtllm", source, "--out", plain, "--device", "cpu")
    runs.invoke("trtllm", source, "--out", out, "--device", "cpu", "--hash-source")
    manifest = read_manifest(out)
    assert manifest.plan_id == read_manifest(plain).plan_id
    for file in manifest.source.files:
        assert file.sha256 == hashlib.sha256((source / file.name).read_bytes()).hexdigest()
        assert file.sha256_from == "read"
    assert {file.sha256_from for file in read_manifest(plain).source.files} == {None}
    assert ", read" in " ".join(runs.invoke("inspect", out).split())
    assert "not known" in " ".join(runs.invoke("inspect", plain).split())


def linked(source: Path, root: Path) -> Path:
    """The snapshot of a cache: links to blobs, those of weights named by their SHA-256."""
    blobs, snapshot = root / "blobs", root / "snapshots" / "commit"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in source.iterdir():
        data = path.read_bytes()
        blob = blobs / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def test_a_cache_names_its_blobs_by_their_digest(source: Path, tmp_path: Path) -> None:
    snapshot = linked(source, tmp_path / "models--org--name")
    for file in open_source(str(snapshot)).files:
        assert file.sha256 == hashlib.sha256((source / file.name).read_bytes()).hexdigest()
        assert file.sha256_from == "cache blob name"


def test_a_blob_that_is_not_what_its_name_says_is_named(source: Path, tmp_path: Path) -> None:
    snapshot = linked(source, tmp_path / "models--org--name")
    name = open_source(str(snapshot)).files[0].name
    data = bytearray((snapshot / name).read_bytes())
    data[-1] ^= 1
    (snapshot / name).write_bytes(data)
    with pytest.raises(SourceError, match=rf"`{name}` is damaged: expected SHA-256 .*cache blob"):
        moeconv.hash_source(open_source(str(snapshot)))


def test_a_digest_that_was_given_is_confirmed(source: Path, tmp_path: Path) -> None:
    snapshot = linked(source, tmp_path / "models--org--name")
    once = moeconv.hash_source(open_source(str(snapshot)))
    assert {file.sha256_from for file in once.files} == {"cache blob name and read"}
    assert moeconv.hash_source(once) == once


def test_of_the_hub_it_is_both_told_and_read(hub: FakeHub, source: Path, tmp_path: Path) -> None:
    """The plan rests on what was told, so that the source comes back from the manifest alone."""
    hub.store.add_folder("org/tiny", source)
    for name, options, where in (
        ("told", (), "hub metadata"),
        ("read", ("--hash-source",), "hub metadata and read"),
        ("kept", ("--keep-source",), "hub metadata"),
    ):
        out = tmp_path / name
        runs.invoke("trtllm", "org/tiny", "--out", out, "--device", "cpu", *options)
        files = read_manifest(out).source.files
        assert {file.sha256_from for file in files} == {where}
        back = tmp_path / f"{name}-back"
        runs.invoke("restore", out, "--out", back, "--device", "cpu")
        assert runs.tree(back) == runs.tree(source)
        runs.invoke("verify", out, "--source", "org/tiny", "--device", "cpu")
    assert read_manifest(tmp_path / "told").plan_id == read_manifest(tmp_path / "read").plan_id


def test_a_finished_conversion_learns_the_digests(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ("trtllm", source, "--out", out, "--device", "cpu")
    runs.invoke(*args)
    before = runs.tree(out)
    said = runs.invoke(*args, "--hash-source")
    assert "already converted with these options; the SHA-256 of its source is noted" in said
    after = runs.tree(out)
    assert {name for name in after if after[name] != before.get(name)} == {"moeconv.json"}
    for file in read_manifest(out).source.files:
        assert file.sha256 == hashlib.sha256((source / file.name).read_bytes()).hexdigest()
        assert file.sha256_from == "read"
    runs.invoke("verify", out, "--read-data", "--source", source)
    when = (out / "moeconv.json").stat().st_mtime_ns
    runs.invoke(*args, "--hash-source")
    assert (out / "moeconv.json").stat().st_mtime_ns == when


def test_a_source_that_changed_since_is_another_one(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """One bit between the places that a plan looks at."""
    source = make_checkpoint(hidden=512, intermediate=512, shards=1)
    out = tmp_path / "out"
    args = ("trtllm", source, "--out", out, "--device", "cpu")
    runs.invoke(*args, "--hash-source")
    (path,) = source.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)
    runs.invoke(*args)
    with pytest.raises(VerifyError, match=rf"`{path.name}` of the source is not what was conv"):
        runs.invoke(*args, "--hash-source")


def test_a_program_hashes_before_and_after(source: Path, tmp_path: Path) -> None:
    checkpoint = moeconv.open_checkpoint(str(source))
    plan = moeconv.make_plan(checkpoint, "trtllm-bf16")
    *_, plain = moeconv.convert(plan, checkpoint, tmp_path / "out", device="cpu")
    known = moeconv.hash_source(checkpoint)
    *_, noted = moeconv.convert(plan, known, tmp_path / "out", device="cpu")
    *_, first = moeconv.convert(plan, known, tmp_path / "first", device="cpu")
    assert isinstance(plain, Manifest)
    assert isinstance(noted, Manifest)
    assert isinstance(first, Manifest)
    assert noted.source == first.source != plain.source


def test_the_pass_has_a_bar(source: Path, tmp_path: Path) -> None:
    args = ("trtllm", source, "--out", tmp_path / "out", "--device", "cpu", "--hash-source")
    for _ in range(2):
        assert "hashing the source" in runs.on_a_terminal(*args)
