"""How large files come to the fake Hub: the LFS batch, whole files, and files in parts."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from tests.hub.wire import Call, RefusedError


def batch(call: Call, name: str) -> None:
    """POST /NAME.git/info/lfs/objects/batch: where each file goes; nowhere, if it is here."""
    said = call.read_json()
    call.own_repo(name)
    part, hub = call.hub.part_bytes, call.hub
    in_parts = part is not None and "multipart" in said.get("transfers", [])
    objects = []
    for asked in said["objects"]:
        answer = {"oid": asked["oid"], "size": asked["size"], "authenticated": True}
        if not hub.has_blob(asked["oid"]):
            href, header = f"{hub.url}/lfs-store/{asked['oid']}", {}
            if in_parts and part is not None and asked["size"] > part:
                count = -(-asked["size"] // part)
                header = {str(i + 1): f"{href}/part/{i + 1}" for i in range(count)}
                header["chunk_size"] = str(part)
                href += "/complete"
            verify = {"href": f"{hub.url}/{name}.git/info/lfs/objects/verify"}
            answer["actions"] = {"upload": {"href": href, "header": header}, "verify": verify}
        objects.append(answer)
    call.json(
        {"transfer": "multipart" if in_parts else "basic", "objects": objects},
        headers={"Content-Type": "application/vnd.git-lfs+json"},
    )


def put(call: Call, oid: str) -> None:
    """PUT /lfs-store/OID, a whole file."""
    part = call.hub.store.part(f"{oid}.{secrets.token_hex(4)}")
    _save(call, part)
    if not call.hub.store.take_part(part, oid):
        raise RefusedError(400, "the bytes are not what their SHA-256 says")
    call.send(200, {"ETag": f'"{oid[:32]}"'})


def put_part(call: Call, oid: str, number: str) -> None:
    """PUT /lfs-store/OID/part/NUMBER; the completion names it by this `ETag`."""
    etag = _save(call, call.hub.store.part(f"{oid}.{int(number):05d}"))
    call.send(200, {"ETag": f'"{etag}"'})


def complete(call: Call, oid: str) -> None:
    """POST /lfs-store/OID/complete: the parts become a file."""
    said = call.read_json()
    whole = call.hub.store.part(f"{oid}.whole")
    with whole.open("wb") as file:
        for part in sorted(said["parts"], key=lambda part: part["partNumber"]):
            path = call.hub.store.part(f"{oid}.{part['partNumber']:05d}")
            file.write(path.read_bytes())
            path.unlink()
    if not call.hub.store.take_part(whole, oid):
        raise RefusedError(400, "the bytes are not what their SHA-256 says")
    call.json({"success": True})


def verify(call: Call, name: str) -> None:
    """POST /NAME.git/info/lfs/objects/verify."""
    said = call.read_json()
    call.own_repo(name)
    path = call.hub.store.blob(said["oid"])
    if not path.exists() or path.stat().st_size != said["size"]:
        raise RefusedError(404, "the file is missing, or of another size")
    call.json({"success": True})


def _save(call: Call, path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in call.chunks():
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()[:32]
