"""A checkpoint in a directory of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from moeconv.checkpoint.header import POINTER, read_header
from moeconv.checkpoint.sidefiles import MANIFEST_NAME, find_side_files, warnings_of_pointers
from moeconv.errors import SourceError, UnsupportedError
from moeconv.paths import is_text, open_regular, read_regular
from moeconv.ranges.openfiles import OpenFiles

if TYPE_CHECKING:
    from moeconv.checkpoint.origin import Span
    from moeconv.checkpoint.types import SourceFile, TensorRef
    from moeconv.ranges.rows import Numbers, Tables
    from moeconv.tensors import Bytes

    _State: TypeAlias = tuple[int, int, int]

_CHUNK_BYTES: Final = 1 << 20
_SHA256: Final = re.compile("[0-9a-f]{64}")


class LocalRanges(OpenFiles):
    """Byte ranges of files in a directory, which must stay as they are while they are read.

    Parameters
    ----------
    root
        The directory.
    seen
        What files were when their headers were read; any other is taken as it is at its first read.
    """

    def __init__(self, root: Path, seen: Mapping[str, _State] | None = None) -> None:
        super().__init__(root)
        self._seen = seen or {}
        self._first: dict[str, tuple[Path, _State]] = {}

    def read_range(self, file: str, begin: int, out: Bytes) -> int:
        """Fill `out` from an offset on; return how many bytes there were.

        Raises
        ------
        OSError
            The file cannot be opened or read.
        SourceError
            It is no longer what it was at the first read.
        """
        with self._unchanged(file):
            return super().read_range(file, begin, out)

    def read_rows(self, file: str, begins: Numbers, tables: Tables) -> int:
        """Fill rows in one call; the errors are those of `read_range`."""
        with self._unchanged(file):
            return super().read_rows(file, begins, tables)

    @contextmanager
    def _unchanged(self, file: str) -> Iterator[None]:
        """Refuse a file that is another when the block has read it."""
        path, first = self._first.get(file) or self._noted(file)
        yield
        _check_same(path, file, first)

    def _noted(self, file: str) -> tuple[Path, _State]:
        path = self.root / file
        return self._first.setdefault(file, (path, self._seen.get(file) or _state(path)))

    def ahead(self, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """Leave reading ahead to the kernel."""
        del spans
        return nullcontext()


def _state(path: Path) -> _State:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check_text(path: str) -> None:
    if not is_text(path):
        message = f"`{ascii(path)[1:-1]}` is not UTF-8, and no manifest could name it"
        raise SourceError(message, hint="rename it")


def _check_same(path: Path, name: str, first: _State) -> None:
    if _state(path) != first:
        message = f"`{name}` changed while it was read"
        raise SourceError(message, hint="let nothing write there; then run again")


@dataclass(frozen=True, slots=True)
class LocalOrigin:
    """A directory; where it is a snapshot of the Hub's, of which commit, and its files' SHA-256.

    Attributes
    ----------
    seen
        What the files were that the plan is made from: nothing else may be read under their names.
    """

    root: Path
    repo: str | None = None
    commit: str | None = None
    digests: Mapping[str, str | None] = field(default_factory=dict)
    seen: dict[str, _State] = field(default_factory=dict, compare=False)

    @property
    def where(self) -> str:
        """The directory as it was given, or the repository it is a snapshot of."""
        return f"{self.repo}@{self.commit}" if self.repo else str(self.root)

    @property
    def name(self) -> str:
        """The directory's name, or the repository's."""
        return self.repo.rpartition("/")[2] if self.repo else self.root.resolve().name

    @property
    def is_remote(self) -> bool:
        """Its bytes are here."""
        return False

    def check(self) -> None:
        """Refuse what is no directory, or one of ours.

        Raises
        ------
        SourceError
            It is no directory, or has a name that is no text.
        UnsupportedError
            It is converted, or on the way to it.
        """
        _check_text(str(self.root))
        if not self.root.is_dir():
            message = f"`{self.root}` is not a directory"
            hint = "give one that holds `config.json`, or `org/name` for one on the Hub"
            raise SourceError(message, hint=hint)
        _check_text(self.name)
        if (self.root / MANIFEST_NAME).exists():
            message = f"`{self.root}` is already converted: it holds `{MANIFEST_NAME}`"
            hint = "converting twice would scramble the weights; point at the original checkpoint"
            raise UnsupportedError(message, hint=hint)
        if (self.root / ".moeconv").is_dir():
            message = f"`{self.root}` is a half-finished conversion: it holds `.moeconv/`"
            hint = "point at the original checkpoint; the same command resumes the conversion"
            raise UnsupportedError(message, hint=hint)

    def top_names(self) -> list[str]:
        """Return what is at the top, sorted."""
        return sorted(path.name for path in self.root.iterdir())

    def holds(self, name: str) -> bool:
        """Say whether there is such a file."""
        return (self.root / name).is_file()

    def side_files(self) -> tuple[str, ...]:
        """Return what a converted directory keeps beside weights, sorted."""
        return find_side_files(self.root)

    def warnings(self, names: Sequence[str]) -> list[str]:
        """Return what is odd about these files."""
        return list(warnings_of_pointers(self.root, names))

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the bytes of a small file."""
        path = self.root / name
        try:
            self.seen.setdefault(name, _state(path))
            data = read_regular(path, most_bytes)
        except FileNotFoundError:
            message = f"`{path.name}` is not in `{path.parent}`"
            raise SourceError(message, hint="is this a checkpoint directory?") from None
        except OSError as error:
            message = f"`{path}` cannot be read: {error.strerror}"
            raise SourceError(message) from error
        if data.startswith(POINTER):
            message = f"`{path}` is a Git LFS pointer, not the file itself"
            raise SourceError(message, hint="run `git lfs pull` in the checkpoint")
        return data

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file."""
        path = self.root / name
        try:
            with os.fdopen(open_regular(path), "rb", buffering=0) as file:
                first = self.seen.get(name) or _state(path)
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
            _check_same(path, name, first)
        except OSError as error:
            message = f"`{path}` cannot be read: {error.strerror}"
            raise SourceError(message) from error

    def headers(self, names: Sequence[str]) -> list[tuple[SourceFile, list[TensorRef]]]:
        """Return what each weight file is and which tensors it holds."""
        return [self._header(name) for name in names]

    def _header(self, name: str) -> tuple[SourceFile, list[TensorRef]]:
        with suppress(OSError):  # reading it tells
            self.seen.setdefault(name, _state(self.root / name))
        file, refs = read_header(self.root, name)
        return self._with_digest(file), refs

    def _with_digest(self, file: SourceFile) -> SourceFile:
        """Return the file with the digest that the Hub gave, or that names it in a Hub cache."""
        if given := self.digests.get(file.name):
            return replace(file, sha256=given, sha256_from="hub metadata")
        blob = (self.root / file.name).resolve()
        if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
            return replace(file, sha256=blob.name, sha256_from="cache blob name")
        return file

    def open(self, ahead_bytes: int) -> LocalRanges:
        """Return byte ranges of its files; the kernel has its own memory for what comes next."""
        del ahead_bytes
        return LocalRanges(self.root, self.seen)
