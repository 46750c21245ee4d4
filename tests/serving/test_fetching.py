"""What an engine is told to serve is found here, or fetched from the Hub, at one commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moeconv.errors import SourceError
from moeconv.serving import fetching
from moeconv.serving.fetching import fetch, is_converted
from moeconv.serving.reader import open_converted
from tests import runs
from tests.hub.state import FakeHub

NAME = "org/converted"


@pytest.fixture(autouse=True)
def forget() -> Callable[[], None]:
    """Let a process begin anew: it has found no commit yet, and fetched none."""

    def clear() -> None:
        fetching._commit.cache_clear()
        fetching._fetched.cache_clear()

    clear()
    return clear


@pytest.fixture
def published(hub: FakeHub, converted: Path) -> str:
    """The commit of a converted model, with something to restore, on the Hub."""
    commit = hub.store.add_folder(NAME, converted)
    hub.store.add(NAME, {"restore/headers.safetensors": b"0" * 100})
    return commit.oid


def test_a_directory_is_taken_as_it_is(converted: Path, source: Path):
    assert fetch(str(converted), None, None) == converted
    assert is_converted(str(converted), None, None)
    assert not is_converted(str(source), None, None)


def test_a_repository_is_fetched_and_read(hub: FakeHub, published: str, converted: Path):
    root = fetch(NAME, None, None)
    assert runs.rank_bytes(root, tp=2, rank=1) == runs.rank_bytes(converted, tp=2, rank=1)
    assert not (root / "restore").exists()
    with open_converted(root) as directory:
        assert directory.manifest.layout.id == "trtllm-bf16"
    count = len(hub.log)
    assert fetch(NAME, None, None) == root
    assert len(hub.log) == count


def test_a_branch_that_moves_on_is_left_where_it_was(hub: FakeHub, published: str):
    root = fetch(NAME, "main", None)
    hub.store.add(NAME, {"moeconv.json": b"{}"})
    assert fetch(NAME, "main", None) == root
    assert is_converted(NAME, "main", None)


def test_a_revision_and_a_cache_of_ones_own(hub: FakeHub, published: str, tmp_path: Path):
    root = fetch(NAME, published, str(tmp_path / "cache"))
    assert root.name == published
    assert root.is_relative_to(tmp_path / "cache")


def test_what_is_no_converted_model(hub: FakeHub):
    hub.store.add("org/plain", {"config.json": b"{}"})
    assert not is_converted("org/plain", None, None)
    assert not is_converted("org/nothing", None, None)
    assert not is_converted("s3://bucket/model", None, None)
    with pytest.raises(SourceError, match=r"`moeconv.json` is not in `org/plain`"):
        fetch("org/plain", None, None)


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("org/nothing", None, "there is none for you"),
        (NAME, "v9", "no such revision"),
        ("no such/name/at all", None, "neither a directory nor a repository"),
    ],
)
def test_refusals_are_words(
    hub: FakeHub, published: str, name: str, revision: str | None, words: str
):
    with pytest.raises(SourceError, match=words):
        fetch(name, revision, None)


def test_a_gated_repository(hub: FakeHub, published: str):
    hub.store.repos[NAME].gated = True
    with pytest.raises(SourceError, match="access on request"):
        fetch(NAME, None, None)


def test_offline_the_cache_will_do(
    hub: FakeHub, published: str, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(SourceError, match="nor is it in the cache"):
            fetch(NAME, None, None)
    root = fetch(NAME, None, None)
    forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(NAME, None, None) == root
