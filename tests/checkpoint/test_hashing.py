"""Which digest a source file has, and where it is from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from moeconv.checkpoint.hashing import hashed
from moeconv.errors import SourceError
from moeconv.output.codec import read_manifest
from moeconv.sourcing import open_source
from tests import runs


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
        hashed(open_source(str(snapshot)))
