"""What the fake Hub says to those who read: repositories, trees, files."""

from __future__ import annotations

from urllib.parse import parse_qs, quote, urlsplit

from tests.hub.store import Entry, Repo, sha1
from tests.hub.wire import Call, RefusedError

POINTER_BYTES = 134


def whoami(call: Call) -> None:
    """GET /api/whoami-v2."""
    call.check_known()
    access = {"displayName": "ci", "role": "write"}
    auth = {"type": "access_token", "accessToken": access}
    call.json({"type": "user", "id": "0", "name": call.hub.user, "orgs": [], "auth": auth})


def info(call: Call, name: str, revision: str = "main") -> None:
    """GET /api/models/NAME[/revision/REVISION]."""
    repo = call.repo(name)
    commit = call.commit_of(repo, revision)
    siblings = []
    for path, entry in sorted(commit.tree.items()):
        sibling: dict[str, object] = {"rfilename": path}
        if "blobs" in call.query:
            sibling |= {"size": entry.size, "blobId": entry.blob_id}
            if entry.is_lfs:
                lfs = {"sha256": entry.oid, "size": entry.size, "pointerSize": POINTER_BYTES}
                sibling["lfs"] = lfs
        siblings.append(sibling)
    call.json(
        {
            "_id": "0",
            "id": name,
            "modelId": name,
            "author": name.partition("/")[0],
            "sha": commit.oid,
            "lastModified": commit.date,
            "createdAt": commit.date,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": siblings,
        }
    )


def tree(call: Call, name: str, revision: str, folder: str | None = None) -> None:
    """GET /api/models/NAME/tree/REVISION[/FOLDER], a page at a time."""
    commit = call.commit_of(call.repo(name), revision)
    is_deep = call.query.get("recursive", ["false"])[0].lower() in {"1", "true"}
    prefix = f"{folder.rstrip('/')}/" if folder else ""
    items: dict[str, dict[str, object]] = {}
    for path, entry in sorted(commit.tree.items()):
        if not path.startswith(prefix):
            continue
        parts = path[len(prefix) :].split("/")
        for depth in range(1, len(parts) if is_deep else min(len(parts), 2)):
            above = prefix + "/".join(parts[:depth])
            items.setdefault(above, _folder(above))
        if is_deep or len(parts) == 1:
            items[path] = _file(call, path, entry)
    if folder and not items:
        raise RefusedError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
    start = int(call.query.get("cursor", ["0"])[0])
    end = start + call.hub.page_size
    headers = {}
    if end < len(items):
        address = urlsplit(call.path)
        said = {**call.query, "cursor": [str(end)]}
        kept = "&".join(f"{key}={quote(value[0])}" for key, value in said.items())
        headers["Link"] = f'<{call.hub.url}{address.path}?{kept}>; rel="next"'
    call.json(list(items.values())[start:end], headers=headers)


def paths_info(call: Call, name: str, revision: str) -> None:
    """POST /api/models/NAME/paths-info/REVISION; unknown paths are left out."""
    body = b"".join(call.chunks()).decode()
    found = call.commit_of(call.repo(name), revision).tree
    paths = parse_qs(body).get("paths", [])
    items = [_file(call, path, found[path]) for path in paths if path in found]
    items += [_folder(p) for p in paths if any(path.startswith(f"{p}/") for path in found)]
    call.json(items)


def _folder(path: str) -> dict[str, object]:
    return {"type": "directory", "oid": sha1(path.encode()), "size": 0, "path": path}


def _file(call: Call, path: str, entry: Entry) -> dict[str, object]:
    item: dict[str, object] = {
        "type": "file",
        "oid": entry.blob_id,
        "size": entry.size,
        "path": path,
    }
    if entry.is_lfs:
        item["lfs"] = {"oid": entry.oid, "size": entry.size, "pointerSize": POINTER_BYTES}
        if call.hub.xet and (found := call.hub.cas.find(entry.oid)):
            item["xetHash"] = found
    return item


def resolve(call: Call, name: str, revision: str, path: str) -> None:
    """GET or HEAD /NAME/resolve/REVISION/PATH: the file, or where to find it."""
    repo = call.repo(name)
    _check_access(call, repo)
    commit = call.commit_of(repo, revision)
    entry = commit.tree.get(path)
    if entry is None:
        raise RefusedError(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": commit.oid})
    headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{entry.oid}"'}
    if not (entry.is_lfs and call.hub.has_cdn):
        call.send_entry(entry, headers)
        return
    headers |= {"X-Linked-Size": str(entry.size), "X-Linked-Etag": f'"{entry.oid}"'}
    found = call.hub.cas.find(entry.oid) if call.hub.xet else None
    if found:
        token = f"{call.hub.url}/api/models/{name}/xet-read-token/{commit.oid}"
        headers |= {"X-Xet-Hash": found, "Link": f'<{token}>; rel="xet-auth"'}
    where = f"{call.hub.cdn_url}/cdn/{entry.oid}/{entry.size}?Signature={call.hub.sign()}"
    call.send(302, {**headers, "Location": where})


def _check_access(call: Call, repo: Repo) -> None:
    """Files of a gated repository are for those who asked; its listing is for everyone."""
    if repo.gated and not (repo.granted and call.is_known):
        status = 403 if call.is_known else 401
        raise RefusedError(status, f"Access to model {repo.id} is restricted", "GatedRepo")


def cdn(call: Call, oid: str, size: str) -> None:
    """GET /cdn/…: bytes, for whoever has a signature; a token must not come here."""
    if "Authorization" in call.headers:
        raise RefusedError(400, "the token went to the CDN")
    if not call.hub.is_signed(call.query.get("Signature", [""])[0]):
        raise RefusedError(403, "the signature has expired")
    call.send_entry(Entry(int(size), oid, is_lfs=True), {"ETag": f'"{oid[:32]}"'})


def auth_check(call: Call, name: str, write: str | None) -> None:
    """GET /api/models/NAME/auth-check[/write]."""
    call.own_repo(name) if write else call.repo(name)
    call.json({})


def refs(call: Call, name: str) -> None:
    """GET /api/models/NAME/refs."""
    branches: list[dict[str, str]] = []
    pulls: list[dict[str, str]] = []
    for ref, oid in call.repo(name).refs.items():
        is_pull = ref.startswith("refs/pr/")
        full = ref if is_pull else f"refs/heads/{ref}"
        item = {"name": ref.rpartition("/")[2], "ref": full, "targetCommit": oid}
        (pulls if is_pull else branches).append(item)
    call.json({"branches": branches, "converts": [], "tags": [], "pullRequests": pulls})


def commits(call: Call, name: str, revision: str) -> None:
    """GET /api/models/NAME/commits/REVISION, the newest first."""
    repo = call.repo(name)
    at, items = repo.find(revision), []
    while at:
        authors = [{"user": call.hub.user}]
        item = {"id": at.oid, "title": at.title, "message": "", "date": at.date, "authors": authors}
        items.append(item)
        at = repo.commits.get(at.parent or "")
    call.json(items)


def xet_token(call: Call, name: str, kind: str, revision: str) -> None:
    """GET /api/models/NAME/xet-{read,write}-token/REVISION."""
    call.own_repo(name) if kind == "write" else call.repo(name)
    if not call.hub.xet:
        raise RefusedError(404, "no Xet here")
    expires, url = 4_000_000_000, call.hub.cas.url
    call.json(
        {"accessToken": "xet_fake", "exp": expires, "casUrl": url},
        headers={
            "X-Xet-Cas-Url": url,
            "X-Xet-Access-Token": "xet_fake",
            "X-Xet-Token-Expiration": str(expires),
        },
    )
