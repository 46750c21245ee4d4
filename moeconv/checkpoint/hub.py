"""A checkpoint in a repository of the Hub, at one commit: nothing of it touches the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars, httpx

from moeconv.checkpoint.ahead import HubRanges
from moeconv.checkpoint.header import header_bytes, parse_header
from moeconv.checkpoint.hubcalls import TIMEOUT_S, ask, in_words
from moeconv.checkpoint.local import LocalOrigin
from moeconv.checkpoint.remote import RemoteFile
from moeconv.checkpoint.sidefiles import check_name, is_side_file
from moeconv.errors import SourceError

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint, SourceFile, TensorRef

_START_BYTES: Final = 1 << 17
"""The first request for a shard: most headers are no longer."""

_QUICK_S: Final = (0.0, 1.0)
"""Whether a name is one is not worth half a minute of waiting: it may be a slip."""

_CHUNK_BYTES: Final = 1 << 24
_STREAMS: Final = 16


@dataclass(frozen=True, slots=True)
class HubOrigin:
    """A commit of a repository, and its files: size, and SHA-256 where the Hub says it."""

    repo: str
    commit: str
    files: Mapping[str, tuple[int, str | None]]
    remotes: Mapping[str, RemoteFile]

    @property
    def where(self) -> str:
        """The repository and the commit."""
        return f"{self.repo}@{self.commit}"

    @property
    def name(self) -> str:
        """The repository's name, without its owner."""
        return self.repo.rpartition("/")[2]

    @property
    def is_remote(self) -> bool:
        """Its bytes come over the network."""
        return True

    def top_names(self) -> list[str]:
        """Return the files at the top, sorted."""
        return sorted(name for name in self.files if "/" not in name)

    def holds(self, name: str) -> bool:
        """Say whether there is such a file."""
        return name in self.files

    def side_files(self) -> tuple[str, ...]:
        """Return what a converted directory keeps beside weights, sorted."""
        found = []
        for name in sorted(self.files):
            path = PurePosixPath(name)
            is_hidden = any(part.startswith(".") for part in path.parts)
            if is_side_file(path.name) and not is_hidden:
                check_name(name)
                found.append(name)
        return tuple(found)

    def warnings(self, names: Sequence[str]) -> list[str]:
        """Return what is odd about these files: nothing, on the Hub."""
        del names
        return []

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the bytes of a small file."""
        if name not in self.files:
            message = f"`{name}` is not in `{self.where}`"
            raise SourceError(message, hint="is this a checkpoint in safetensors?")
        if self.files[name][0] > most_bytes:
            message = f"`{name}` in `{self.where}` is larger than {most_bytes} bytes"
            raise SourceError(message)
        return b"".join(self.chunks(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file."""
        size = self.files[name][0]
        for begin in range(0, size, _CHUNK_BYTES):
            yield self._bytes(name, begin, min(begin + _CHUNK_BYTES, size))

    def headers(self, names: Sequence[str]) -> list[tuple[SourceFile, list[TensorRef]]]:
        """Return what each weight file is and which tensors it holds; many at a time."""
        with ThreadPoolExecutor(_STREAMS, thread_name_prefix="moeconv-hub") as pool:
            return list(pool.map(self._header, names))

    def open(self, ahead_bytes: int) -> HubRanges:
        """Return byte ranges of its files, with memory for what is fetched ahead."""
        return HubRanges(lambda name, begin, out: self.remotes[name].fill(begin, out), ahead_bytes)

    def _header(self, name: str) -> tuple[SourceFile, list[TensorRef]]:
        size, sha256 = self.files[name]
        start = self._bytes(name, 0, min(_START_BYTES, size))
        wanted = header_bytes(name, size, start)
        if wanted > len(start):
            start += self._bytes(name, len(start), wanted)
        file, refs = parse_header(name, size, start)
        return replace(file, sha256=sha256, sha256_from=sha256 and "hub metadata"), refs

    def _bytes(self, name: str, begin: int, end: int) -> bytes:
        out = bytearray(end - begin)
        self.remotes[name].fill(begin, memoryview(out))
        return bytes(out)


def find_on_hub(repo: str, revision: str | None) -> HubOrigin | LocalOrigin:
    """Resolve a revision to its commit; offline, to the snapshot in the library's cache.

    Raises
    ------
    SourceError
        There is no such repository or revision for this person, or no network.
    """
    what = f"{repo}@{revision}" if revision else repo
    if constants.HF_HUB_OFFLINE:
        return _cached(repo, revision, what)
    info = ask(
        what,
        lambda: HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S),
    )
    files = {
        file.rfilename: (file.size or 0, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or ()
    }
    commit = info.sha or ""
    return HubOrigin(repo, commit, files, {it: RemoteFile(repo, commit, it) for it in files})


def is_on_hub(repo: str) -> bool:
    """Say whether there is a repository of exactly this name; offline, whether it is in the cache.

    Raises
    ------
    SourceError
        The Hub does not answer.
    """
    if constants.HF_HUB_OFFLINE:
        return _snapshot(repo, None) is not None

    def found() -> bool:
        try:
            return HfApi().model_info(repo, timeout=TIMEOUT_S).id == repo
        except RepositoryNotFoundError:
            return False

    return ask(repo, found, _QUICK_S)


def where_asked() -> str:
    """Return what to add where a repository was not found and nobody on the network was asked."""
    return " in the cache, and `HF_HUB_OFFLINE` is set" if constants.HF_HUB_OFFLINE else ""


def fetch(checkpoint: Checkpoint, origin: HubOrigin) -> LocalOrigin:
    """Fetch the files of a checkpoint whole, into the library's cache.

    Raises
    ------
    SourceError
        The Hub refuses or stays away, or the disk is full.
    """
    names = [file.name for file in checkpoint.files]
    names += [name for name in origin.files if name.endswith(".safetensors.index.json")]
    disable_progress_bars()
    try:
        folder = snapshot_download(
            origin.repo, revision=origin.commit, allow_patterns=[*names, *checkpoint.side_files]
        )
    except (httpx.HTTPError, OSError) as error:
        raise in_words(origin.where, error) from error
    digests = {name: sha256 for name, (_, sha256) in origin.files.items()}
    return LocalOrigin(Path(folder), origin.repo, origin.commit, digests)


def _cached(repo: str, revision: str | None, what: str) -> LocalOrigin:
    folder = _snapshot(repo, revision)
    if folder is None:
        message = f"`{what}` is not in the cache, and `HF_HUB_OFFLINE` is set"
        hint = f"unset it, or fetch it where there is a network: `hf download {repo}`"
        raise SourceError(message, hint=hint)
    return LocalOrigin(folder, repo, folder.name)


def _snapshot(repo: str, revision: str | None) -> Path | None:
    """Return where the library's cache has a revision, if it does."""
    try:
        return Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
