"""What the fake Hub does for those who write: repositories, commits, branches, pull requests."""

from __future__ import annotations

import base64
import json
import re
import time
from typing import Any

from tests.hub.store import Entry, Repo, goes_to_lfs
from tests.hub.wire import Call, RefusedError


def create_repo(call: Call) -> None:
    """POST /api/repos/create."""
    said = call.read_json()
    call.check_known()
    name = _name(call, said)
    url = f"{call.hub.url}/{name}"
    with call.hub.lock:
        if name in call.hub.store.repos:
            call.json({"error": "You already created this model repo", "url": url}, 409)
            return
        call.hub.store.new_repo(name, private=said.get("visibility") == "private")
    call.json({"url": url, "name": name, "id": name})


def delete_repo(call: Call) -> None:
    """DELETE /api/repos/delete."""
    said = call.read_json()
    call.check_known()
    if call.hub.store.repos.pop(_name(call, said), None) is None:
        raise RefusedError(404, "Repository not found", "RepoNotFound")
    call.json({})


def _name(call: Call, said: dict[str, Any]) -> str:
    return f"{said.get('organization') or call.hub.user}/{said['name']}"


def preupload(call: Call, name: str, revision: str) -> None:
    """POST /api/models/NAME/preupload/REVISION: which way each file has to go."""
    said = call.read_json()
    tree = call.commit_of(call.own_repo(name), revision).tree
    files = []
    for file in said["files"]:
        mode = "lfs" if goes_to_lfs(file["path"], file["size"]) else "regular"
        ignored = call.hub.ignored is not None and re.search(call.hub.ignored, file["path"])
        item = {"path": file["path"], "uploadMode": mode, "shouldIgnore": bool(ignored)}
        if file["path"] in tree:
            item["oid"] = tree[file["path"]].oid  # the client leaves out what has not changed
        files.append(item)
    call.json({"files": files})


def commit(call: Call, name: str, revision: str) -> None:
    """POST /api/models/NAME/commit/REVISION[?create_pr=1], a line of JSON for each change."""
    lines = [json.loads(line) for line in b"".join(call.chunks()).splitlines() if line.strip()]
    repo, hub = call.own_repo(name), call.hub
    head, changes = lines[0]["value"], lines[1:]
    with hub.lock:
        old = call.commit_of(repo, revision)
        parent, is_pull = head.get("parentCommit"), "create_pr" in call.query
        if parent and not old.oid.startswith(parent) and not is_pull:
            raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(old.tree)
        for change in changes:
            _change(call, tree, change["key"], change["value"])
        answer: dict[str, object] = {"success": True, "hookOutput": ""}
        ref = revision
        if is_pull:
            pull = _new_pull(call, repo, head["summary"], revision)
            ref = f"refs/pr/{pull['num']}"
            answer["pullRequestUrl"] = f"{hub.url}/{name}/discussions/{pull['num']}"
        new = hub.store.commit(repo, ref, tree, head["summary"])
    url = f"{hub.url}/{name}/commit/{new.oid}"
    call.json({**answer, "commitOid": new.oid, "commitUrl": url})


def _change(call: Call, tree: dict[str, Entry], key: str, value: dict[str, Any]) -> None:
    path = value["path"]
    if key == "file":
        tree[path] = call.hub.store.keep(base64.b64decode(value["content"]))
    elif key == "lfsFile":
        if not call.hub.has_blob(value["oid"]):
            raise RefusedError(400, f"an LFS pointer pointed to a file that does not exist: {path}")
        size = value.get("size") or _size(call, value["oid"])
        tree[path] = Entry(size, value["oid"], is_lfs=True)
    elif key == "deletedFile":
        if tree.pop(path, None) is None:
            raise RefusedError(404, "A file with this name doesn't exist", "EntryNotFound")
    elif key == "deletedFolder":
        for below in [it for it in tree if it.startswith(f"{path.rstrip('/')}/")]:
            del tree[below]


def _size(call: Call, oid: str) -> int:
    """Return the size of a file that is somewhere here: a copy between repositories says none."""
    return next(
        entry.size
        for repo in call.hub.store.repos.values()
        for made in repo.commits.values()
        for entry in made.tree.values()
        if entry.oid == oid
    )


def _new_pull(call: Call, repo: Repo, title: str, base: str) -> dict[str, object]:
    number = len(repo.pulls) + 1
    pull: dict[str, object] = {
        "num": number,
        "title": title,
        "author": {"name": call.hub.user},
        "status": "draft",
        "isPullRequest": True,
        "createdAt": time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()),
        "repo": {"name": repo.id, "type": "model"},
        "events": [],
        "changes": {"base": f"refs/heads/{base}"},
        "filesWithConflicts": [],
        "diff": "",
    }
    repo.pulls.append(pull)
    repo.refs[f"refs/pr/{number}"] = call.commit_of(repo, base).oid
    return pull


def create_discussion(call: Call, name: str) -> None:
    """POST /api/models/NAME/discussions: a pull request without a change yet."""
    said = call.read_json()
    repo = call.own_repo(name)
    with call.hub.lock:
        number = _new_pull(call, repo, said["title"], "main")["num"]
    call.json({"num": number, "url": f"{call.hub.url}/{name}/discussions/{number}"})


def discussion(call: Call, name: str, number: str) -> None:
    """GET /api/models/NAME/discussions/NUMBER."""
    pulls = call.repo(name).pulls
    if not 0 < int(number) <= len(pulls):
        raise RefusedError(404, "no such discussion")
    call.json(pulls[int(number) - 1])


def create_branch(call: Call, name: str, branch: str) -> None:
    """POST /api/models/NAME/branch/BRANCH."""
    said = call.read_json()
    repo = call.own_repo(name)
    if branch in repo.refs:
        raise RefusedError(409, "Reference already exists")
    repo.refs[branch] = call.commit_of(repo, said.get("startingPoint") or "main").oid
    call.json({})


def delete_branch(call: Call, name: str, branch: str) -> None:
    """DELETE /api/models/NAME/branch/BRANCH."""
    repo = call.own_repo(name)
    if branch == "main" or repo.refs.pop(branch, None) is None:
        raise RefusedError(404, "Invalid branch", "RevisionNotFound")
    call.json({})


def validate_yaml(call: Call) -> None:
    """POST /api/validate-yaml, which a commit of README.md asks first."""
    call.json({"errors": [], "warnings": []})


def duplicate(call: Call, name: str) -> None:
    """POST /api/models/NAME/lfs-files/duplicate: copies between repositories."""
    said = call.read_json()
    call.repo(name)
    call.own_repo(said["target"]["name"])
    asked = [file["sha256"] for file in said["files"]]
    failed = [{"sha256": oid, "error": "not found"} for oid in asked if not call.hub.has_blob(oid)]
    call.json({"succeeded": len(asked) - len(failed), "failed": failed})
