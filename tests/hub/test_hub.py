"""The fake Hub, as the real client finds it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.hub.state import FakeHub, Fault

DATA = bytes(range(256)) * 5000


def test_files_come_as_they_went_up(hub: FakeHub, tmp_path: Path):
    from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download

    api = HfApi()
    api.create_repo("org/model", private=True)
    hub.part_bytes = 300_000  # five parts
    operations = [
        CommitOperationAdd("a.safetensors", DATA),
        CommitOperationAdd("deep/er/config.json", b"{}"),
    ]
    api.preupload_lfs_files("org/model", operations[:1])
    assert len(hub.seen("PUT", "/part/")) == 5
    head = api.create_commit("org/model", operations, commit_message="first").oid
    assert hub.store.read("org/model", "a.safetensors") == DATA
    info = api.model_info("org/model", files_metadata=True)
    assert info.sha == head
    assert info.private
    lfs = {file.rfilename: file.lfs.sha256 for file in info.siblings or () if file.lfs}
    assert lfs == {"a.safetensors": hashlib.sha256(DATA).hexdigest()}
    for name, data in (("a.safetensors", DATA), ("deep/er/config.json", b"{}")):
        path = hf_hub_download("org/model", name, revision=head)
        assert Path(path).read_bytes() == data
    again = [CommitOperationAdd("a.safetensors", DATA)]
    assert api.create_commit("org/model", again, commit_message="the same").oid == head


def test_a_tree_comes_in_pages(hub: FakeHub):
    from huggingface_hub import HfApi

    hub.page_size = 3
    names = {f"folder/{i}.json": b"{}" for i in range(10)}
    commit = hub.store.add("org/model", names)
    tree = HfApi().list_repo_tree("org/model", revision=commit.oid, recursive=True)
    assert {item.path for item in tree} == {*names, "folder", ".gitattributes"}
    assert len(hub.seen("GET", "/tree/")) == 4


def test_a_stale_parent_is_refused_and_a_branch_stands_apart(hub: FakeHub):
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    first = hub.store.new_repo("org/model").head
    api.create_branch("org/model", branch="work")
    operations = [CommitOperationAdd("a.txt", b"a")]
    api.create_commit("org/model", operations, commit_message="a", revision="work")
    assert "a.txt" not in hub.store.repos["org/model"].head.tree
    hub.store.add("org/model", {"b.txt": b"b"})
    operations = [CommitOperationAdd("a.txt", b"a")]
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit("org/model", operations, commit_message="a", parent_commit=first.oid)


def test_a_pull_request_is_made_with_its_commit(hub: FakeHub):
    from huggingface_hub import CommitOperationAdd, HfApi

    hub.store.new_repo("org/model")
    operation = CommitOperationAdd("a.txt", b"a")
    made = HfApi().create_commit("org/model", [operation], commit_message="a", create_pr=True)
    assert made.pr_num == 1
    assert "a.txt" not in hub.store.repos["org/model"].head.tree
    files = HfApi().list_repo_files("org/model", revision="refs/pr/1")
    assert "a.txt" in files


def test_the_client_gets_over_faults(hub: FakeHub):
    from huggingface_hub import hf_hub_download

    hub.store.add("org/model", {"a.safetensors": DATA})
    hub.faults = [
        Fault("GET", "/cdn/", cut=100_000),
        Fault("HEAD", "/resolve/", status=429, headers={"Retry-After": "0"}),
    ]
    path = hf_hub_download("org/model", "a.safetensors")
    assert Path(path).read_bytes() == DATA
    assert [it.sent for it in hub.seen("GET", "/cdn/")] == [100_000, len(DATA)]


@pytest.mark.parametrize(
    ("private", "gated", "token", "name"),
    [
        pytest.param(False, False, True, "RepositoryNotFoundError", id="missing"),
        pytest.param(True, False, False, "RepositoryNotFoundError", id="private"),
        pytest.param(False, True, True, "GatedRepoError", id="gated"),
        pytest.param(False, True, False, "GatedRepoError", id="gated, no token"),
    ],
)
def test_the_client_knows_the_refusals(
    hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    private: bool,
    gated: bool,
    token: bool,
    name: str,
):
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    if private or gated:
        hub.store.add("org/model", {"a.safetensors": DATA})
        hub.store.repos["org/model"].private = private
        hub.store.repos["org/model"].gated = gated
    if not token:
        monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(getattr(errors, name)):
        get_hf_file_metadata(hf_hub_url("org/model", "a.safetensors"))


def test_addresses_expire(hub: FakeHub):
    from huggingface_hub import get_hf_file_metadata, get_session, hf_hub_url

    hub.store.add("org/model", {"a.safetensors": DATA})
    where = get_hf_file_metadata(hf_hub_url("org/model", "a.safetensors")).location
    headers = {"Range": "bytes=10-19"}
    assert get_session().get(where, headers=headers).content == DATA[10:20]
    hub.expire()
    assert get_session().get(where, headers=headers).status_code == 403


def test_files_go_through_xet(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("hf_xet")
    from huggingface_hub import CommitOperationAdd, HfApi, constants, hf_hub_download

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.xet = True
    path = tmp_path / "a.safetensors"
    path.write_bytes(DATA)
    operation = CommitOperationAdd("a.safetensors", path)
    HfApi().create_repo("org/model")
    HfApi().create_commit("org/model", [operation], commit_message="first")
    assert not hub.seen("PUT", "/lfs-store/")
    assert Path(hf_hub_download("org/model", "a.safetensors")).read_bytes() == DATA
