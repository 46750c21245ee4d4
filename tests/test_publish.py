"""Conversions on their way to the Hub: whole or not at all, on a small disk, through faults."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from moeconv.cli import app
from moeconv.errors import MoeconvError
from moeconv.output.alone import alone
from moeconv.output.card import carried
from tests import runs
from tests.hub.state import FakeHub, Fault
from tests.sources import Tiny, write_tiny
from tests.watching import Disk

REPO = "org/converted"
CARD = "---\nlicense: mit\nlanguage:\n- en\nlibrary_name: transformers\n---\n# Tiny\n"
SIZE = ("--max-shard-size", "500kB")
"""A layer of four experts is 786 kB, so that it makes two shards; the rest makes another."""

SHARDS = 6


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = write_tiny(tmp_path / "source", Tiny(hidden=256))
    (root / "README.md").write_text(CARD)
    (root / "LICENSE").write_text("as you like")
    return root


@pytest.fixture
def plain(source: Path, tmp_path: Path) -> Path:
    runs.invoke("trtllm", source, "--out", tmp_path / "plain", *SIZE)
    return tmp_path / "plain"


def push(source: Path, out: Path, *args: str) -> str:
    return runs.invoke("trtllm", source, "--out", out, *SIZE, "--push", REPO, *args)


def dry(source: Path, out: Path, *args: str) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(
        push(source, out, "--dry-run", "--json", *args).split("\n")[-2]
    )
    return plan


def refused(*args: str | Path) -> MoeconvError:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert isinstance(result.exception, MoeconvError), result.output
    return result.exception


def refused_push(source: Path, out: Path, *args: str) -> MoeconvError:
    return refused("trtllm", source, "--out", out, *SIZE, "--push", REPO, *args)


def repo(hub: FakeHub, ref: str = "main") -> dict[str, bytes]:
    commit = hub.store.repos[REPO].find(ref)
    assert commit is not None
    return {path: hub.store.read(REPO, path, ref) for path in commit.tree}


def sent(hub: FakeHub) -> list[str]:
    return [seen.path for seen in hub.seen("PUT", "/lfs-store/") if seen.status == 200]


def check_same(hub: FakeHub, plain: Path, ref: str = "main") -> None:
    """Compare the repository with a conversion that stayed on disk."""
    there, here = repo(hub, ref), runs.tree(plain)
    del there["README.md"], there[".gitattributes"]
    manifest = {**json.loads(there.pop("moeconv.json")), "run": None, "run_digest": None}
    assert manifest == here.pop("moeconv.json")
    assert there == here


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


def test_what_was_sent_is_not_sent_again(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    out = tmp_path / "out"
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=3, status=403))
    error = refused_push(source, out, "--max-disk", "600kB")
    assert error.exit_code == 5
    assert "not allowed" in str(error)
    assert "moeconv.json" not in repo(hub)
    assert len(sent(hub)) == 3
    push(source, out, "--max-disk", "600kB")
    check_same(hub, plain)
    assert len(sent(hub)) == SHARDS, sent(hub)


def test_another_machine_goes_on(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=3, status=403))
    refused_push(source, tmp_path / "out", "--max-disk", "600kB")
    push(source, tmp_path / "elsewhere", "--max-disk", "600kB")
    check_same(hub, plain)
    assert len(sent(hub)) == SHARDS, sent(hub)


def test_a_kill_loses_nothing(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    out = tmp_path / "out"
    args = ("trtllm", source, "--out", out, *SIZE, "--push", REPO, "--max-disk", "600kB")
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=2, delay_s=20))
    process = runs.start("none", 0, *args)
    while len(sent(hub)) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.3)
    process.kill()
    process.communicate()
    hub.faults.clear()
    push(source, out, "--max-disk", "600kB")
    check_same(hub, plain)


def test_shares_of_several_machines_join(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    for part in ("1/2", "2/2"):
        push(source, tmp_path / part[0], "--max-disk", "900kB", "--shard-of", part)
        assert "moeconv.json" not in repo(hub)
    assert len(sent(hub)) == SHARDS, sent(hub)
    push(source, tmp_path / "last", "--max-disk", "900kB")
    check_same(hub, plain)
    assert len(sent(hub)) == SHARDS, sent(hub)


def test_a_lost_race_is_said(hub: FakeHub, source: Path, tmp_path: Path):
    hub.store.new_repo(REPO)
    hub.faults.append(Fault("POST", "/commit/main", status=412))
    error = refused_push(source, tmp_path / "out")
    assert "somebody else has changed it" in str(error)
    push(source, tmp_path / "out")
    assert "moeconv.json" in repo(hub)


def test_a_lost_answer_is_no_second_commit(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    hub.faults.append(Fault("POST", "/commit/main", cut=0))
    push(source, tmp_path / "out")
    check_same(hub, plain)


@pytest.mark.parametrize("status", [429, 503])
def test_what_passes_is_waited_for(hub: FakeHub, source: Path, tmp_path: Path, status: int):
    hub.faults.append(Fault("POST", "/commit/", status=status, headers={"Retry-After": "0"}))
    push(source, tmp_path / "out")
    assert "moeconv.json" in repo(hub)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "token is not accepted"),
        (402, "no storage left"),
        (403, "not allowed"),
        (413, "too large"),
        (418, "the Hub answers 418"),
    ],
)
def test_what_stays_is_said_at_once(
    hub: FakeHub, source: Path, tmp_path: Path, status: int, words: str
):
    fault = Fault("POST", "/branch/", times=5, status=status)
    hub.faults.append(fault)
    error = refused_push(source, tmp_path / "out")
    assert words in str(error)
    assert error.hint
    assert not (tmp_path / "out").exists()
    assert fault.times == 4


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a connection up at once, and let neither the library nor us wait before the next."""
    from huggingface_hub.utils import _http

    from moeconv.output import hubcalls

    monkeypatch.setattr(hubcalls, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(hubcalls, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(_http, "time", SimpleNamespace(**{**vars(time), "sleep": lambda _s: None}))


@pytest.mark.usefixtures("short_patience")
def test_a_connection_on_which_nothing_moves_is_given_up(
    hub: FakeHub, source: Path, plain: Path, tmp_path: Path
):
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=1, cut=0, stall_s=2))
    push(source, tmp_path / "out")
    check_same(hub, plain)


@pytest.mark.usefixtures("short_patience")
def test_a_stall_without_end_is_said_and_gone_on_from(
    hub: FakeHub, source: Path, plain: Path, tmp_path: Path
):
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=3, times=99, cut=0, stall_s=2))
    error = refused_push(source, tmp_path / "out", "--max-disk", "600kB")
    assert "nothing moves for 0.3 s" in str(error)
    assert "what is sent is kept" in str(error.hint)
    assert "moeconv.json" not in repo(hub)
    hub.faults.clear()
    push(source, tmp_path / "out", "--max-disk", "600kB")
    check_same(hub, plain)
    assert len(sent(hub)) == SHARDS, sent(hub)


def test_no_token(hub: FakeHub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_TOKEN")
    error = refused_push(source, tmp_path / "out")
    assert "there is no token" in str(error)
    assert "hf auth login" in str(error.hint)
    assert not hub.log


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


def test_a_gitignore_that_drops_files_is_noticed(hub: FakeHub, source: Path, tmp_path: Path):
    hub.store.add(REPO, {".gitignore": b"*.safetensors\n"})
    hub.ignored = r"\.safetensors$"
    error = refused_push(source, tmp_path / "out")
    assert ".gitignore" in str(error.hint)
    assert "moeconv.json" not in repo(hub)


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


def test_a_dry_run_sends_nothing(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    shown = json.loads(runs.invoke("push", plain, REPO, "--dry-run", "--json"))
    assert (shown["shards_to_send"], shown["shards_there"]) == (SHARDS, 0)
    assert not [seen for seen in hub.log if seen.method != "GET"]
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=3, status=403))
    refused_push(source, tmp_path / "out", "--max-disk", "600kB")
    shown = json.loads(runs.invoke("push", plain, REPO, "--dry-run", "--json"))
    assert (shown["shards_to_send"], shown["shards_there"]) == (SHARDS - 3, 3)


def test_a_dry_run_of_what_is_published(hub: FakeHub, source: Path, plain: Path, tmp_path: Path):
    runs.invoke("push", plain, REPO)
    shown = json.loads(runs.invoke("push", plain, REPO, "--dry-run", "--json"))
    assert (shown["shards_to_send"], shown["bytes_to_send"]) == (0, 0)
    assert (shown["shards_there"], shown["was_there"]) == (SHARDS, True)
    assert dry(source, tmp_path / "out")["push"]["was_there"]
    assert "nothing is left to do" in push(source, tmp_path / "out", "--dry-run")


def test_a_dry_run_of_a_conversion_says_where_it_goes(hub: FakeHub, source: Path, tmp_path: Path):
    plan = dry(source, tmp_path / "out", "--max-disk", "900kB")
    assert not plan["push"]["is_there"]
    assert plan["disk_bytes"] == 900_000 < plan["expert_bytes"]
    said = push(source, tmp_path / "out", "--dry-run", "--max-disk", "900kB")
    assert "a new repository" in said
    assert "at most 900.0 kB of" in " ".join(said.split())
    assert not hub.store.repos
    commit = hub.store.new_repo(REPO).head.oid
    assert dry(source, tmp_path / "out")["push"]["at"] == commit
    hub.faults.append(Fault("PUT", "/lfs-store/", skip=3, status=403))
    refused_push(source, tmp_path / "out", "--max-disk", "600kB")
    assert "3 shards, from earlier runs" in push(source, tmp_path / "elsewhere", "--dry-run")
    assert not [seen for seen in hub.log if seen.method == "DELETE"]


@pytest.mark.parametrize(
    ("change", "args", "words"),
    [
        ("foreign", (), "this is not allowed"),
        ("public", ("--private",), "is public"),
        ("weights", (), "`model.safetensors`"),
        ("", ("--max-disk", "300kB"), "does not hold `experts/"),
    ],
)
def test_a_dry_run_finds_what_publishing_would(
    hub: FakeHub, source: Path, tmp_path: Path, change: str, args: tuple[str, ...], words: str
):
    hub.store.new_repo(REPO).foreign = change == "foreign"
    if change == "weights":
        hub.store.add(REPO, {"model.safetensors": b"theirs"})
    command = ["trtllm", source, "--out", tmp_path / "out", *SIZE, "--push", REPO, "--dry-run"]
    result = CliRunner().invoke(app, [str(arg) for arg in (*command, *args)])
    assert result.exit_code == 5
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_damaged_shard_is_not_published(hub: FakeHub, plain: Path):
    shard = next(plain.glob("experts/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert "is damaged" in str(refused("push", plain, REPO))
    assert "moeconv.json" not in repo(hub)


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
