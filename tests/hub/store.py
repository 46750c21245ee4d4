"""What the fake Hub holds: repositories, their commits, and the bytes of files."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# The real Hub makes an LFS file of what .gitattributes names, and of what is larger than this.
LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".npz", ".parquet")
REGULAR_BYTES = 10 << 20
GIT_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """A file of a commit; `oid` is a SHA-256 for LFS, and else git's SHA-1."""

    size: int
    oid: str
    is_lfs: bool

    @property
    def blob_id(self) -> str:
        """The SHA-1 of the git blob, which for LFS is a pointer."""
        return sha1(self.oid.encode()) if self.is_lfs else self.oid


@dataclass(frozen=True)
class Commit:
    oid: str
    tree: Mapping[str, Entry]
    parent: str | None
    title: str
    date: str


@dataclass
class Repo:
    """A repository; `gated` asks for access, which the token has where `granted`.

    The token may not write to a `foreign` one.
    """

    id: str
    private: bool = False
    foreign: bool = False
    gated: bool = False
    granted: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    pulls: list[dict[str, object]] = field(default_factory=list)

    def find(self, revision: str) -> Commit | None:
        """Return what a branch, a pull request or the start of a commit's id names."""
        oid = self.refs.get(revision.removeprefix("refs/heads/"), "")
        if not oid and re.fullmatch(r"[0-9a-f]{7,40}", revision):
            oid = next((oid for oid in self.commits if oid.startswith(revision)), "")
        return self.commits.get(oid)

    @property
    def head(self) -> Commit:
        """The newest commit of `main`."""
        return self.commits[self.refs["main"]]


class Store:
    """All repositories, in memory, and their bytes, in the folder `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.repos: dict[str, Repo] = {}
        for folder in ("blobs", "parts", "cas"):
            (root / folder).mkdir(parents=True, exist_ok=True)

    def blob(self, oid: str) -> Path:
        """Return where the bytes of a file are."""
        return self.root / "blobs" / oid

    def part(self, name: str) -> Path:
        """Return where bytes lie that are still on their way."""
        return self.root / "parts" / name

    def new_repo(self, name: str, *, private: bool = False) -> Repo:
        """Make a repository with a first commit, as the Hub does."""
        repo = self.repos[name] = Repo(name, private)
        self.commit(repo, "main", {".gitattributes": self.keep(GIT_ATTRIBUTES)}, "initial commit")
        return repo

    def add(self, name: str, files: Mapping[str, bytes | Path], ref: str = "main") -> Commit:
        """Put files into a repository in one commit, without the network; make it if need be."""
        repo = self.repos.get(name) or self.new_repo(name)
        old = repo.find(ref)
        tree = dict(old.tree) if old else {}
        for path, data in files.items():
            size = len(data) if isinstance(data, bytes) else data.stat().st_size
            tree[path] = self.keep(data, is_lfs=goes_to_lfs(path, size))
        return self.commit(repo, ref, tree, f"add {len(files)} files")

    def add_folder(self, name: str, folder: Path) -> Commit:
        """Put all files of a folder into a repository in one commit."""
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return self.add(name, {str(path.relative_to(folder)): path for path in paths})

    def keep(self, data: bytes | Path, *, is_lfs: bool = False) -> Entry:
        """Keep bytes, or a link to a file."""
        if isinstance(data, bytes):
            oid = hashlib.sha256(data).hexdigest() if is_lfs else git_blob(data)
            self.blob(oid).write_bytes(data)
            return Entry(len(data), oid, is_lfs)
        if not is_lfs:
            return self.keep(data.read_bytes())
        with data.open("rb") as file:
            oid = hashlib.file_digest(file, "sha256").hexdigest()
        if not self.blob(oid).exists():
            self.blob(oid).symlink_to(data.resolve())
        return Entry(data.stat().st_size, oid, is_lfs)

    def commit(self, repo: Repo, ref: str, tree: Mapping[str, Entry], title: str) -> Commit:
        """Add a commit to a branch."""
        date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        new = Commit(secrets.token_hex(20), tree, repo.refs.get(ref), title, date)
        repo.commits[new.oid] = new
        repo.refs[ref] = new.oid
        return new

    def read(self, name: str, path: str, ref: str = "main") -> bytes:
        """Return a file of a repository."""
        commit = self.repos[name].find(ref)
        assert commit is not None
        return self.blob(commit.tree[path].oid).read_bytes()

    def take_part(self, part: Path, oid: str) -> bool:
        """Make a blob of bytes that have come in, if they are what they were said to be."""
        with part.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != oid:
                part.unlink()
                return False
        part.replace(self.blob(oid))
        return True


def goes_to_lfs(path: str, size: int) -> bool:
    """Say whether the Hub keeps a file outside git."""
    return path.endswith(LFS_SUFFIXES) or size > REGULAR_BYTES


def git_blob(data: bytes) -> str:
    """Return what git calls these bytes."""
    return sha1(b"blob %d\0" % len(data) + data)


def sha1(data: bytes) -> str:
    """Return a SHA-1, which git's names are."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
