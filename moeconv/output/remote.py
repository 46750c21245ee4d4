"""A converted model on the Hub, at one commit: what it holds, and byte ranges of its files."""

from __future__ import annotations

import http
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils import get_session, hf_raise_for_status

from moeconv.errors import SourceError, VerifyError
from moeconv.output.codec import check_unchanged, parse_manifest
from moeconv.output.hub import Destination, Repository
from moeconv.output.hubcalls import ask
from moeconv.output.manifest import Manifest
from moeconv.output.names import MANIFEST_NAME
from moeconv.output.tree import Held

if TYPE_CHECKING:
    from moeconv.tensors import Bytes

_SIGNATURE_IS_OLD: Final = {
    status: f"the signed address was refused with {status.value}; they hold for an hour or so"
    for status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN)
}
"""Asked for again, the Hub signs a new one."""


class RemoteModel:
    """A converted model on the Hub.

    Parameters
    ----------
    name
        The repository, `org/name`, or `org/name@revision`.

    Raises
    ------
    SourceError
        There is no such repository or revision for us, or nothing converted in it.
    VerifyError
        The manifest is broken.
    """

    def __init__(self, name: str) -> None:
        self.name, _, revision = name.partition("@")
        self._api = HfApi()
        repository = self._repository = Repository(Destination(self.name), "", SourceError)
        commit = repository.head(revision or "main")
        if commit is None:
            message = f"`{name}` is neither a directory nor a revision of a repository for you"
            raise SourceError(
                message, hint="look at the spelling; `hf auth login` if it is private"
            )
        self.commit = commit
        self.tree: dict[str, Held] = repository.files(commit)
        if MANIFEST_NAME not in self.tree:
            message = f"`{MANIFEST_NAME}` is not in `{name}`"
            raise SourceError(message, hint="is this a converted model?")
        data = repository.read(MANIFEST_NAME, commit)
        self.manifest: Manifest = parse_manifest(data)
        check_unchanged(data)
        self._locations: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._locations.clear()

    def header(self, file: str) -> set[tuple[str, str, tuple[int, ...], int, int]]:
        """Return name, dtype, shape, begin and end of each tensor of a file, by range reads."""
        found = ask(
            f"read the header of `{file}` of `{self.name}`",
            lambda: self._api.parse_safetensors_file_metadata(
                self.name, file, revision=self.commit
            ),
            SourceError,
        )
        infos = found.tensors.items()
        # The parser keeps no start of the data; the format allows no gap at either end.
        data = self.tree[file].size - max((info.data_offsets[1] for _, info in infos), default=0)
        return {
            (
                name,
                info.dtype,
                tuple(info.shape),
                data + info.data_offsets[0],
                data + info.data_offsets[1],
            )
            for name, info in infos
        }

    def read(self, file: str, begin: int, out: Bytes) -> None:
        """Fill `out` (contiguous bytes) from an absolute offset of a file.

        Raises
        ------
        SourceError
            The Hub refuses, or stays away.
        VerifyError
            The file ended early.
        """
        view = memoryview(out).cast("B")
        if not view:
            return
        what = f"read `{file}` of `{self.name}`"
        done = ask(what, lambda: self._read(file, begin, view), SourceError)
        if done < len(view):
            message = f"`{file}` ended early: expected {len(view)} bytes at {begin}, found {done}"
            raise VerifyError(message, hint="publish it again")

    def _read(self, file: str, begin: int, view: memoryview) -> int:
        if self.tree[file].sha256 is None:  # small, and not elsewhere: it needs the token
            data = self._repository.read(file, self.commit)[begin : begin + len(view)]
            view[: len(data)] = data
            return len(data)
        ranges = {"Range": f"bytes={begin}-{begin + len(view) - 1}"}
        done = 0
        with get_session().stream("GET", self._location(file), headers=ranges) as response:
            if response.status_code in _SIGNATURE_IS_OLD:
                self._locations.pop(file)
                raise ConnectionError(_SIGNATURE_IS_OLD[http.HTTPStatus(response.status_code)])
            hf_raise_for_status(response)
            for chunk in response.iter_raw():
                view[done : done + len(chunk)] = chunk
                done += len(chunk)
        return done

    def _location(self, file: str) -> str:
        """Return where the bytes of a file are: for large ones a signed address, without token."""
        if file not in self._locations:
            url = hf_hub_url(self.name, file, revision=self.commit)
            self._locations[file] = get_hf_file_metadata(url).location
        return self._locations[file]
