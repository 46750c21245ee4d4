"""A converted directory, or one on its way, whose notes were changed by somebody else.

Each is refused in a sentence, or read as what it is; nothing waits for ever.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from moeconv.conversion.seal import seal
from moeconv.errors import MoeconvError, OutputError, VerifyError
from moeconv.kernels.cpu import CpuKernels
from moeconv.output.codec import read_manifest
from moeconv.serving import open_converted
from moeconv.verification.verify import verify
from tests import runs
from tests.sources import Tiny, write_tiny
from tests.test_hostile import refusal

DEEP = b"[" * 100_000


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of a conversion is done but to seal it."""
    folder = tmp_path_factory.mktemp("done")
    source, out = write_tiny(folder / "source", Tiny()), folder / "out"
    runs.invoke("trtllm", source, "--out", out, "--device", "cpu", "--shard-of", "1/1")
    return out


@pytest.fixture
def begun(done, tmp_path) -> Path:
    """A copy of that."""
    begun: Path = shutil.copytree(done, tmp_path / "begun")
    return begun


def add(data: bytes, field: bytes) -> bytes:
    """Put a field before the others."""
    return b"{" + field + b"," + data[1:]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: DEEP,
        lambda data: add(data, b'"later": ' + DEEP + b"]" * len(DEEP)),
        lambda data: add(data, b'"later": "\xff"'),
        lambda data: add(data, b'"later": ' + b"9" * 5000),
        lambda data: add(data, b'"later": NaN'),
        lambda data: data.replace(b'"format": 1', b'"format": 1e400'),
        lambda data: data.replace(b'"format": 1', b'"format": ' + b"1" * 5000),
        lambda data: add(data, b'"format": 1'),
        lambda data: data.replace(b'"layer": 0', b'"layer": 7, "layer": 0', 1),
        lambda data: data.decode().encode("utf-16"),
    ],
    ids=[
        *("deep", "deep beside", "raw", "digits", "nan", "infinite", "huge", "twice"),
        *("twice inside", "utf-16"),
    ],
)
def test_a_manifest_that_says_two_things_or_nothing(converted, change):
    path = converted / "moeconv.json"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(VerifyError, match=r"`moeconv\.json` (cannot be read|was changed)"):
        list(verify(converted, CpuKernels()))


def test_a_manifest_that_is_too_deep_is_refused_by_readers(converted):
    (converted / "moeconv.json").write_bytes(DEEP)
    for use in (read_manifest, open_converted):
        with pytest.raises(VerifyError, match="cannot be read"):
            use(converted)


NOTES = ["plan.json", "draft.json", "records/0.json", "runs/1-of-1.json", "locks"]
MAKES = {
    "pipe": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "folder": lambda path: (path / "inside").mkdir(parents=True),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "deep": lambda path: path.write_bytes(DEEP),
    "nothing": lambda path: path.touch(),
}


@pytest.mark.parametrize("name", NOTES)
@pytest.mark.parametrize("make", MAKES)
def test_a_note_that_is_none_ends_in_words(begun, name, make):
    path = begun / ".moeconv" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    MAKES[make](path)
    if (name, make) == ("locks", "folder"):
        (path / "inside").rmdir()
        seal(begun)
        return
    with pytest.raises(MoeconvError) as error:
        seal(begun)
    assert str(error.value)
    assert not (begun / "moeconv.json").exists()


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("name", ["../source/config.json", "/etc/hostname", "a\\..\\b", "nowhere"])
def test_a_draft_that_names_files_elsewhere_is_not_sealed(begun, name):
    draft = begun / ".moeconv" / "draft.json"
    plan = json.loads(draft.read_text())["plan"]
    change(draft, plan={**plan, "side files": name})
    with pytest.raises(OutputError, match="a small file of the checkpoint"):
        seal(begun)
    change(draft, files=[{"path": name, "size": 1, "sha256": ""}])
    with pytest.raises(MoeconvError, match=r"outside the directory|lacks 1 of 1"):
        seal(begun)


def test_a_record_without_its_tensors_is_not_sealed(begun):
    path = begun / ".moeconv" / "records" / "0.json"
    kept = json.loads(path.read_text())
    change(path, record={**kept["record"], "tensors": []})
    with pytest.raises(VerifyError, match="is in no record of"):
        seal(begun)


def link(path: Path, away: Path) -> None:
    path.symlink_to(away)


def file(path: Path, _: Path) -> None:
    path.write_text("a file")


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [link, file, pipe])
def test_a_work_folder_that_is_none(source, tmp_path, make):
    out, away = tmp_path / "out", tmp_path / "away"
    for folder in (out, away):
        folder.mkdir()
    make(out / ".moeconv", away)
    for more in ((), ("--overwrite",)):
        assert refusal("trtllm", source, "--out", out, *more)[0] == 5
    assert not list(away.iterdir())


@pytest.mark.parametrize(
    ("out", "match"),
    [
        ("loop", "`.*loop` is a link that leads to nothing"),
        ("loop/below", "`.*loop` is a link that leads to nothing"),
        ("dangling", "`.*dangling` is a link that leads to nothing"),
        ("dangling/below", "`.*dangling` is a link that leads to nothing"),
        ("gone/../out", "goes up from `.*gone`, which is not a directory"),
        (os.fsdecode(b"name-\xe9"), r"name-\\udce9` is not UTF-8"),
    ],
)
@pytest.mark.parametrize("verb", ["trtllm", "restore", "dry run"])
def test_an_output_that_leads_nowhere(source, converted, tmp_path, verb, out, match):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("gone")
    before = sorted(tmp_path.rglob("*"))
    words = {
        "trtllm": ["trtllm", source],
        "dry run": ["trtllm", source, "--dry-run"],
        "restore": ["restore", converted],
    }
    code, said = refusal(*words[verb], "--out", tmp_path / out, "--device", "cpu")
    assert code == 5
    assert re.search(match, said)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("verb", ["trtllm", "restore"])
def test_an_output_below_a_directory_that_was_removed(
    source, converted, tmp_path, monkeypatch, verb
):
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    _, said = refusal(verb, source if verb == "trtllm" else converted, "--out", "out")
    assert "`out` is nowhere: the working directory was removed" in said
    monkeypatch.chdir(tmp_path)


def test_a_checkpoint_whose_path_is_no_text(source, tmp_path):
    odd = source.rename(tmp_path / os.fsdecode(b"name-\xe9"))
    (tmp_path / "link").symlink_to(odd)
    for given in (odd, tmp_path / "link", tmp_path / os.fsdecode(b"gone\xe9")):
        code, said = refusal("trtllm", given, "--out", tmp_path / "out")
        assert code == 3
        assert "is not UTF-8, and no manifest could name it" in said
    assert not (tmp_path / "out").exists()


def test_an_output_above_the_checkpoint_is_refused(source):
    before = runs.tree(source)
    for more in ((), ("--overwrite",)):
        code, words = refusal("trtllm", source, "--out", source.parent, *more)
        assert code == 5
        assert "not a moeconv directory" in words
    assert runs.tree(source) == before


def test_a_hard_link_to_the_checkpoint_is_replaced_not_written_to(source, converted, tmp_path):
    before, out = runs.tree(source), tmp_path / "out"
    (out / ".moeconv" / "tmp").mkdir(parents=True)
    shard = next(iter(source.glob("*.safetensors")))
    for name in (*runs.shards(converted), ".moeconv/plan.json.part", "config.json"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(shard, out / name)
    runs.run(source, out)
    assert runs.tree(out) == runs.tree(converted)
    assert runs.tree(source) == before
