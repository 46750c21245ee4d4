"""A converted model is verified where it is, on the Hub."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moeconv.cli import app
from moeconv.errors import MoeconvError
from moeconv.output.codec import encode_sealed, read_manifest
from tests import runs
from tests.hub.state import FakeHub, Fault

NAME = "org/converted"


@pytest.fixture
def published(hub: FakeHub, converted: Path) -> str:
    return hub.store.add_folder(NAME, converted).oid


def verify(*args: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(runs.invoke("verify", *args, "--json"))
    return found


def refused(*args: str) -> MoeconvError:
    result = CliRunner().invoke(app, ["verify", *args])
    assert isinstance(result.exception, MoeconvError), result.output
    return result.exception


def test_it_is_as_the_directory(hub: FakeHub, published: str, converted: Path):
    here = {**verify(str(converted)), "out": "", "digests": 0}
    there = verify(NAME)
    assert {**there, "out": "", "digests": 0} == here
    assert there["out"] == f"{NAME}@{published}"
    sizes = sum(path.stat().st_size for path in converted.rglob("*.safetensors"))
    assert sum(seen.sent for seen in hub.seen("GET", "/cdn/")) < sizes / 2


def test_a_look_is_as_at_the_directory(hub: FakeHub, published: str, converted: Path):
    def look(where: str | Path) -> dict[str, Any]:
        (found,) = runs.json_lines(runs.invoke("inspect", where, "--json"))
        return found

    here, there = look(converted), look(NAME)
    assert there["root"] == f"{NAME}@{published}"
    for found, where in ((here, converted), (there, f"{NAME} --revision {published}")):
        assert not found["findings"]
        starts = [engine.pop("start") for engine in found["converted"]["engines"]]
        assert starts
        assert all(f" {where} --" in start for start in starts)
    assert {**here, "root": "", "name": ""} == {**there, "root": "", "name": ""}
    assert f"moeconv verify {NAME}@{published}" in runs.invoke("inspect", NAME)
    assert not hub.seen("GET", "/cdn/")


def test_every_byte_is_read(hub: FakeHub, published: str, converted: Path):
    here = verify(str(converted), "--read-data")
    assert verify(f"{NAME}@main", "--read-data")["digests"] == here["digests"]


def test_an_old_signature_is_renewed(hub: FakeHub, published: str):
    hub.faults.append(Fault("GET", "/cdn/", skip=5, status=403))
    assert verify(NAME, "--read-data")["tensors"]


def test_what_differs_is_named(hub: FakeHub, published: str, converted: Path):
    shard = next(converted.glob("experts/*.safetensors"))
    name = str(shard.relative_to(converted))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    hub.store.add(NAME, {name: bytes(data)})
    error = refused(NAME)
    assert error.exit_code == 6
    assert f"`{name}` has SHA-256" in str(error)
    assert verify(f"{NAME}@{published}")["tensors"]
    hub.store.add(NAME, {name: shard.read_bytes(), "model.safetensors": b"stray"})
    assert "`model.safetensors` is not in" in str(refused(NAME))


def test_bytes_that_are_not_what_the_hub_says(hub: FakeHub, published: str, converted: Path):
    entry = next(
        entry for path, entry in hub.store.repos[NAME].head.tree.items() if "experts/" in path
    )
    blob = hub.store.blob(entry.oid)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    assert verify(NAME)["tensors"]
    assert "is damaged" in str(refused(NAME, "--read-data"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/nothing", "neither a directory nor"),
        (f"{NAME}@v9", "neither"),
        ("org/plain", "is not"),
    ],
)
def test_refusals_are_words(hub: FakeHub, published: str, name: str, words: str):
    hub.store.add("org/plain", {"config.json": b"{}"})
    error = refused(name)
    assert words in str(error)
    assert error.exit_code == 3


def test_a_hub_that_cannot_be_asked_is_no_output(
    hub: FakeHub, published: str, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = refused(NAME)
    assert "`HF_HUB_OFFLINE` is set" in str(error)
    assert error.exit_code == 3


def test_a_checkpoint_is_compared_with_a_copy(hub: FakeHub, published: str, source: Path):
    assert "hf download" in str(refused(NAME, "--source", str(source)).hint)


def test_the_source_is_compared_by_its_digests(hub: FakeHub, converted: Path, source: Path):
    commit = hub.store.add_folder("org/source", source)
    manifest = read_manifest(converted)
    assert "--source SRC" in str(refused(str(converted), "--against-source").hint)
    files = [replace(file, sha256=commit.tree[file.name].oid) for file in manifest.source.files]
    for known in (files, [replace(files[0], sha256="0" * 64), *files[1:]]):
        said = replace(manifest.source, name="org/source", revision=commit.oid, files=tuple(known))
        data = encode_sealed(replace(manifest, source=said))
        (converted / "moeconv.json").write_bytes(data)
        hub.store.add_folder(NAME, converted)
        for where in (str(converted), NAME):
            if known == files:
                shown = runs.invoke("verify", where, "--against-source", "--json")
                assert runs.json_lines(shown)[-1]["files"] == len(files)
            else:
                error = refused(where, "--against-source")
                assert "is not what was converted" in str(error)
                assert error.exit_code == 6


def test_a_manifest_that_was_changed(hub: FakeHub, published: str, converted: Path):
    data = (converted / "moeconv.json").read_bytes()
    hub.store.add(NAME, {"moeconv.json": data.replace(b"bfloat16", b"float16x")})
    assert "was changed" in str(refused(NAME))
