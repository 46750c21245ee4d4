"""Conversions on their way to the Hub: whole or not at all, on a small disk."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from moeconv.output.alone import alone
from moeconv.output.card import carried
from tests import runs
from tests.hub.state import FakeHub, Fault
from tests.publishing.pushes import (
    CARD,
    REPO,
    SHARDS,
    SIZE,
    check_same,
    push,
    refused,
    refused_push,
    repo,
    sent,
)
from tests.sources import Tiny
from tests.watching import Disk


def test_a_model_appears_in_one_commit(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    push(source, tmp_path / "out")
    check_same(hub, plain)
    assert list(hub.store.repos[REPO].refs) == ["main"]
    assert len(sent(hub)) == SHARDS, sent(hub)
    assert repo(hub)["README.source.md"].decode() == CARD
    before = len(hub.log)
    runs.invoke("push", tmp_path / "out", REPO)
    assert not [seen for seen in hub.log[before:] if "/commit/" in seen.path]


def test_a_small_disk(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    out = tmp_path / "out"
    push(source, out, "--max-disk", "900kB")
    assert not list(out.rglob("*.safetensors"))
    check_same(hub, plain)
    before = len(hub.log)
    push(source, tmp_path / "elsewhere", "--max-disk", "900kB")  # as another machine would
    assert not [seen for seen in hub.log[before:] if "/commit/" in seen.path]


def test_the_disk_never_holds_more(hub: FakeHub, source: Path, tmp_path: Path):
    hub.faults.append(Fault("PUT", "/lfs-store/", times=2, delay_s=0.3))
    with Disk(tmp_path / "out") as disk:
        push(source, tmp_path / "out", "--max-disk", "900kB")
    assert 400_000 < disk.most_bytes < 950_000  # with records and side files


def test_a_disk_that_does_not_hold_a_shard_is_refused(hub: FakeHub, source: Path, tmp_path: Path):
    error = refused_push(source, tmp_path / "out", "--max-disk", "300kB")
    assert error.exit_code == 5
    assert "does not hold `experts/" in str(error)
    assert not (tmp_path / "out").exists()
    assert not hub.log
    args = ("trtllm", source, "--out", tmp_path / "out", *SIZE, "--max-disk", "300kB")
    assert "--push" in str(refused(*args).hint)


def test_shares_of_several_machines_join(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    hub.faults.append(Fault("PUT", "/lfs-store/", times=SHARDS, delay_s=0.2))
    for part in ("1/2", "2/2"):
        push(source, tmp_path / part[0], "--max-disk", "900kB", "--shard-of", part)
        assert "moeconv.json" not in repo(hub)
    assert len(sent(hub)) == SHARDS, sent(hub)
    push(source, tmp_path / "last", "--max-disk", "900kB")
    check_same(hub, plain)
    assert len(sent(hub)) == SHARDS, sent(hub)


def test_a_public_repository_stays_public(hub: FakeHub, source: Path, tmp_path: Path):
    hub.store.new_repo(REPO)
    assert "is public" in str(refused_push(source, tmp_path / "out", "--private"))
    push(source, tmp_path / "out")
    hub.store.repos.pop(REPO)
    push(source, tmp_path / "out", "--private")
    assert hub.store.repos[REPO].private


def test_somebody_elses_weights_are_kept(hub: FakeHub, source: Path, tmp_path: Path):
    hub.store.add(REPO, {"model.safetensors": b"theirs"})
    error = refused_push(source, tmp_path / "out")
    assert "`model.safetensors`" in str(error)
    assert repo(hub)["model.safetensors"] == b"theirs"


def test_a_pull_request(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    push(source, tmp_path / "out", "--create-pr")
    assert "moeconv.json" not in repo(hub)
    check_same(hub, plain, "refs/pr/1")


def test_another_branch(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    push(source, tmp_path / "out", "--revision", "v1")
    assert "moeconv.json" not in repo(hub)
    check_same(hub, plain, "v1")


def test_a_new_conversion_replaces_the_old_one(hub: FakeHub, source: Path, tmp_path: Path):
    runs.invoke("trtllm", source, "--out", tmp_path / "tp", "--tp", "2")
    runs.invoke("push", tmp_path / "tp", REPO)
    push(source, tmp_path / "out")
    runs.invoke("trtllm", source, "--out", tmp_path / "plain", *SIZE)
    check_same(hub, tmp_path / "plain")


def test_two_at_once(hub: FakeHub, plain: Path):
    with alone(plain):
        assert "another process" in str(refused("push", plain, REPO))


def test_a_source_card_that_cannot_be_read(hub: FakeHub, source: Path, tmp_path: Path):
    (source / "README.md").write_text("---\nlicense: [\n---\n")
    assert "metadata of `README.md`" in str(refused_push(source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_card(hub: FakeHub, source: Path, tmp_path: Path):
    from huggingface_hub import ModelCard

    push(source, tmp_path / "out")
    card = ModelCard(repo(hub)["README.md"].decode())
    assert card.data.get("license") == "mit"
    assert card.data.get("library_name") == "moeconv"
    assert "trtllm-bf16" in card.data.get("tags")
    held = Tiny(hidden=256).tensors().values()
    count = sum(len(data) // 2 for dtype, _, data in held if dtype == "BF16")
    assert f"| parameters | {count:,} |" in card.text
    assert f"vllm serve {REPO} --load-format moeconv" in card.text
    assert f"moeconv verify {REPO}" in card.text


def test_through_xet(
    hub: FakeHub, source: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("hf_xet")
    from huggingface_hub import constants, hf_hub_download

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.xet = True
    push(source, tmp_path / "out", "--max-disk", "900kB")
    assert not sent(hub)
    manifest = json.loads(hub.store.read(REPO, "moeconv.json"))
    shards = [it["path"] for it in manifest["files"] if it["path"].endswith(".safetensors")]
    assert len(shards) == SHARDS
    for path in shards:
        copy = Path(hf_hub_download(REPO, path))
        assert copy.read_bytes() == (plain / path).read_bytes()


def test_a_card_without_metadata_is_no_reason_to_complain(caplog):
    library = logging.getLogger("huggingface_hub")
    library.addHandler(caplog.handler)
    try:
        assert carried("") == carried("# A model\n") == {}
    finally:
        library.removeHandler(caplog.handler)
    assert not caplog.records
