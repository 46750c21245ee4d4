"""A checkpoint of the Hub: found, looked at, streamed, whatever the network does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from moeconv.checkpoint import remote
from moeconv.cli import app
from moeconv.errors import MoeconvError, OutputError, SourceError, UnsupportedError
from moeconv.families import FAMILIES
from moeconv.output.records import ShardRecord
from moeconv.sourcing import open_source, publishers
from tests import runs
from tests.fp4.models import Model
from tests.hub.state import FakeHub, Fault

REPO = "Qwen/Tiny-MoE"


@pytest.fixture
def published(hub: FakeHub, source: Path) -> Path:
    """The checkpoint `source`, on the Hub as `REPO`."""
    hub.store.add_folder(REPO, source)
    return source


def _shards(out: Path) -> dict[str, bytes]:
    """The data of each shard; its header names the plan, which names the source."""
    return {str(it.relative_to(out)): it.read_bytes()[4096:] for it in out.rglob("*.safetensors")}


def test_the_bytes_are_those_of_the_directory(
    hub: FakeHub, published: Path, converted: Path, tmp_path: Path
):
    out = tmp_path / "out"
    done = runs.moeconv("trtllm", REPO, "--out", out)
    assert done.returncode == 0, done.stderr
    assert _shards(out) == _shards(converted)
    manifest = json.loads((out / "moeconv.json").read_bytes())
    head = hub.store.repos[REPO].head
    assert manifest["source"]["name"] == REPO
    assert manifest["source"]["revision"] == head.oid
    digests = {file["name"]: file["sha256"] for file in manifest["source"]["files"]}
    assert digests == {name: it.oid for name, it in head.tree.items() if it.is_lfs}
    assert not list((tmp_path / "hf-home").rglob("*"))
    assert head.oid in done.stderr
    runs.invoke("verify", out, "--source", f"{REPO}@{head.oid}")


def test_a_dry_run_counts_the_shards_of_the_directory_too(published: Path):
    """What restoring needs follows from headers alone, where no scales are to be read."""
    plans = [runs.moeconv("trtllm", it, "--dry-run", "--json") for it in (REPO, published)]
    far, near = (json.loads(it.stdout.splitlines()[-1]) for it in plans)
    assert far["shards"] == near["shards"]
    assert far["sidecar_bytes"] == near["sidecar_bytes"] > 0
    assert f"`{REPO}` is on the Hub, at commit " in plans[0].stderr


def test_a_dry_run_says_what_it_has_not_tried(hub: FakeHub, tmp_path: Path):
    model = Model("modelopt")
    hub.store.add_folder(REPO, model.write(tmp_path / "source"))
    said = runs.invoke("marlin-fp4", REPO, "--dry-run", "--push", "org/converted")
    assert "first, of scales, which were not read" in " ".join(said.split())
    assert "go to the Hub" in said
    assert "without the network" in " ".join(said.split())
    plan = json.loads(runs.invoke("marlin-fp4", REPO, "--dry-run", "--json").splitlines()[-1])
    tensors = {name: len(data) for name, (_, _, data) in model.tensors().items()}
    scales = sum(size for name, size in tensors.items() if "weight_scale" in name)
    assert plan["network_bytes"] == sum(tensors.values()) + scales
    kept = runs.invoke("marlin-fp4", REPO, "--dry-run", "--keep-source")
    assert "and stay in the library's cache" in " ".join(kept.split())
    assert "of scales" not in kept


def test_kept_files_are_of_the_same_plan(hub: FakeHub, published: Path, tmp_path: Path):
    streamed, kept = open_source(REPO), open_source(REPO, keep=True)
    assert list((tmp_path / "hf-home").rglob("*.safetensors"))
    assert not kept.origin.is_remote
    assert kept.origin.where == streamed.origin.where
    assert [file.sha256 for file in kept.files] == [file.sha256 for file in streamed.files]
    assert kept.side_files == streamed.side_files
    assert dict(kept.tensors) == dict(streamed.tensors)


def test_a_revision_is_pinned_and_another_one_refused(
    hub: FakeHub, published: Path, tmp_path: Path
):
    first = hub.store.repos[REPO].head.oid
    runs.run(Path(REPO), tmp_path / "out")
    hub.store.add(REPO, {"new.txt": b"new"})
    with pytest.raises(OutputError, match=f"source revision .{first} there"):
        runs.run(Path(REPO), tmp_path / "out")
    runs.run(Path(f"{REPO}@{first}"), tmp_path / "out")


def test_a_run_goes_on_with_the_commit_that_it_began_with(
    hub: FakeHub, make_checkpoint: Callable[..., Path], tmp_path: Path
):
    source, out = make_checkpoint(hidden=256, intermediate=128), tmp_path / "out"
    args = ("--out", str(out), "--max-shard-size", "300kB", "--max-host-memory", "8MB")

    def refused(name: str) -> str:
        error = CliRunner().invoke(app, ["trtllm", name, *args]).exception
        assert isinstance(error, MoeconvError)
        return str(error)

    first = hub.store.add_folder(REPO, source)
    hub.store.repos[REPO].refs["dev"] = first.oid
    hub.faults = [Fault("GET", "/cdn/", skip=20, times=99, status=404)]
    assert "404" in refused(REPO)
    done = list(out.glob("experts/*"))
    assert done
    hub.faults.clear()
    second = hub.store.add(REPO, {"new.txt": b"new"})
    hub.store.repos[REPO].refs["dev"] = second.oid
    for other in (f"{REPO}@{second.oid}", f"{REPO}@dev"):
        assert "source revision" in refused(other)
    for dry in (["--dry-run"], []):
        said = runs.invoke("trtllm", f"{REPO}@main", *args, *dry)
        assert f"goes on with `{REPO}@{first.oid}`" in " ".join(said.split())
    manifest = json.loads((out / "moeconv.json").read_bytes())
    assert manifest["source"]["revision"] == first.oid
    assert manifest["run"]["jobs_resumed"] == len(done)
    wanted = runs.Wanted(max_shard_bytes=300_000)
    assert _shards(out) == _shards(runs.run(source, tmp_path / "plain", wanted))


@pytest.mark.parametrize("verb", ["inspect", "trtllm"])
def test_a_look_costs_kilobytes(hub: FakeHub, tmp_path: Path, verb: str):
    from tests.test_memory import write_sparse

    source = write_sparse(tmp_path / "large", 64)
    hub.store.add_folder(REPO, source)
    done = runs.moeconv(verb, REPO, "--json", *(["--dry-run"] if verb == "trtllm" else []))
    assert done.returncode == 0, done.stderr
    assert (source / "model.safetensors").stat().st_size > 50 << 20
    assert hub.sent_bytes < 300_000
    assert len(hub.log) < 10


@pytest.mark.parametrize(
    "said",
    [
        REPO,
        f"{REPO}@main",
        f"https://huggingface.co/{REPO}",
        f"https://huggingface.co/{REPO}/tree/main",
        "Tiny-MoE",
        "Tiny-MoE@main",
    ],
)
def test_a_repository_is_found_by_each_of_its_names(hub: FakeHub, published: Path, said: str):
    checkpoint = open_source(said)
    assert checkpoint.name == "Tiny-MoE"
    assert checkpoint.origin.repo == REPO
    assert REPO in checkpoint.notes[0]


def test_a_directory_of_the_name_wins(
    hub: FakeHub, published: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(published.parent)
    published.rename(published.parent / "Tiny-MoE")
    assert open_source("Tiny-MoE").origin.repo is None
    assert not hub.log


def test_a_name_of_two_publishers_is_no_name(hub: FakeHub, published: Path):
    hub.store.add_folder("nvidia/Tiny-MoE", published)
    with pytest.raises(SourceError, match="2 publishers") as refused:
        open_source("Tiny-MoE")
    assert f"`{REPO}`" in str(refused.value.hint)
    assert "`nvidia/Tiny-MoE`" in str(refused.value.hint)
    with pytest.raises(SourceError, match="none of the known publishers"):
        open_source("Tiny-MoE-2")


def test_every_family_has_a_publisher():
    assert all(family.publishers for family in FAMILIES)
    assert {"Qwen", "deepseek-ai", "openai", "mistralai"} <= set(publishers())


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault("GET", "/cdn/", times=3, cut=50_000), id="cut"),
        pytest.param(Fault("GET", "/cdn/", cut=0), id="dropped"),
        pytest.param(Fault("GET", "/cdn/", cut=50_000, stall_s=3), id="stalled"),
        pytest.param(Fault("GET", "/cdn/", cut=0, stall_s=3), id="stalled at once"),
        pytest.param(Fault("GET", "/cdn/", status=403), id="expired"),
        pytest.param(
            Fault("GET", "/cdn/", status=429, headers={"Retry-After": "0"}), id="rate limit"
        ),
        pytest.param(
            Fault("GET", "/cdn/", status=429, headers={"RateLimit": '"resolvers";r=0;t=0'}),
            id="rate limit, as the Hub says it",
        ),
        pytest.param(
            Fault("HEAD", "/resolve/", status=429, headers={"Retry-After": "0"}), id="both ways"
        ),
    ],
)
def test_what_passes_is_got_over(
    hub: FakeHub,
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.5)
    source = make_checkpoint(hidden=256, intermediate=128)
    hub.store.add_folder(REPO, source)
    fault.skip = 0 if fault.method == "HEAD" else 1
    hub.faults = [fault]
    out = runs.run(Path(REPO), tmp_path / "out")
    assert fault.times == 0
    assert _shards(out) == _shards(runs.run(source, tmp_path / "converted"))


def test_a_stall_without_end_is_said_and_gone_on_from(
    hub: FakeHub,
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    source = make_checkpoint(hidden=256, intermediate=128)
    hub.store.add_folder(REPO, source)
    out, wanted = tmp_path / "out", runs.Wanted(max_shard_bytes=300_000)
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(remote, "DELAYS_S", (0.0, 0.0))
    events = runs.events(Path(REPO), out, wanted)
    done = next(event for event in events if isinstance(event, ShardRecord))
    hub.faults = [Fault("GET", "/cdn/", times=99, cut=0, stall_s=2)]
    with pytest.raises(SourceError, match="nothing comes for") as refused:
        list(events)
    assert "to go on" in str(refused.value.hint)
    hub.faults.clear()
    kept = (out / done.file).stat().st_mtime_ns
    assert _shards(runs.run(Path(REPO), out, wanted)) == _shards(
        runs.run(source, tmp_path / "plain", wanted)
    )
    assert (out / done.file).stat().st_mtime_ns == kept


def test_addresses_that_expire_are_renewed(hub: FakeHub, published: Path):
    checkpoint = open_source(REPO)
    hub.expire()
    (file, *_) = (ref.file for ref in checkpoint.tensors.values())
    assert len(b"".join(checkpoint.origin.chunks(file))) > 0
    assert 403 in {it.status for it in hub.log}


@pytest.mark.parametrize(
    ("name", "change", "message", "hint"),
    [
        ("org/none", None, "no such repository", "hf auth login"),
        (f"{REPO}@none", None, "no such revision", "behind the `@`"),
        (REPO, "gated", "restricted", "ask for access"),
        (REPO, "private", "no such repository", "HF_TOKEN"),
        (REPO, "converted", "already converted", "original"),
        (REPO, "busy", "answers 401", "hf auth login"),
    ],
)
def test_what_is_final_is_said(
    hub: FakeHub,
    published: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: str | None,
    message: str,
    hint: str,
):
    repo = hub.store.repos[REPO]
    repo.gated = change == "gated"
    repo.private = change == "private"
    if change == "private":
        monkeypatch.delenv("HF_TOKEN")
    if change == "converted":
        hub.store.add(REPO, {"moeconv.json": b"{}"})
    if change == "busy":
        hub.faults = [Fault("GET", "/api/models", status=401)]
    with pytest.raises(MoeconvError, match=message) as refused:
        open_source(name)
    assert hint in str(refused.value.hint)
    assert isinstance(refused.value, SourceError | UnsupportedError)


def test_without_a_network_the_cache_counts(
    hub: FakeHub, published: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants, snapshot_download

    head = hub.store.repos[REPO].head.oid
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match="not in the cache"):
        open_source(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot_download(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_source(REPO).origin.commit == head


def test_a_name_is_looked_for_in_the_cache(
    hub: FakeHub, published: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants, snapshot_download

    snapshot_download(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_source(REPO.partition("/")[2]).origin.repo == REPO
    with pytest.raises(SourceError, match="such a model in the cache, and `HF_HUB_OFFLINE` is set"):
        open_source("Other-MoE")


def test_a_mirror_that_sends_files_by_itself_gets_the_token(
    hub: FakeHub, published: Path, tmp_path: Path
):
    hub.has_cdn = False
    hub.store.repos[REPO].private = True
    assert _shards(runs.run(Path(REPO), tmp_path / "out")) == _shards(
        runs.run(published, tmp_path / "plain")
    )
    assert not hub.seen("GET", "/cdn/")


def test_a_token_in_its_file_will_do(
    hub: FakeHub, published: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    hub.store.repos[REPO].private = True
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(SourceError, match="no such repository for you"):
        open_source(REPO)
    path = Path(constants.HF_TOKEN_PATH)
    path.parent.mkdir(parents=True)
    path.write_text(hub.token)
    assert open_source(REPO).name == "Tiny-MoE"


def test_an_address_where_nobody_is_is_named(published: Path, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    from moeconv.checkpoint import hubcalls

    monkeypatch.setattr(hubcalls, "time", SimpleNamespace(sleep=lambda _s: None))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceError, match=r"the Hub at `http://127\.0\.0\.1:9` is not reachable"):
        open_source(REPO)


def test_the_token_stays_with_the_hub(hub: FakeHub, published: Path):
    open_source(REPO)  # the CDN answers 400 to whoever brings it
    assert {it.status for it in hub.seen("GET", "/cdn/")} == {206}


def test_an_absent_directory_is_no_repository():
    with pytest.raises(SourceError, match="is not a directory"):
        open_source("./nowhere/at/all")


def test_what_stays_here_goes_without_the_library(source: Path, tmp_path: Path):
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    convert = ["trtllm", str(source), "--out", out, "--device", "cpu"]
    check = [["verify", out, "--read-data"], ["rank", out], ["seal", out]]
    restore = ["restore", out, "--out", back, "--device", "cpu"]
    code = (
        "import sys; from moeconv.cli import app\n"
        "for line in map(eval, sys.argv[1:]):\n"
        "    try: app(line, standalone_mode=False)\n"
        "    except SystemExit as end: assert not end.code, line\n"
        "    assert not {'huggingface_hub', 'torch'} & set(sys.modules), line"
    )
    lines = (["inspect", str(source)], [*convert, "--dry-run"], convert, *check, restore)
    command = [sys.executable, "-c", code, *map(repr, lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
