"""What else of a checkpoint is kept? Every file but weights, and none that lies elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NoReturn

from moeconv.checkpoint.header import POINTER
from moeconv.errors import SourceError
from moeconv.paths import is_below, is_text, read_regular

MANIFEST_NAME: Final = "moeconv.json"
WEIGHT_SUFFIXES: Final = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
)
"""Files that hold weights; none is carried over as a side file."""

_RESERVED: Final = ("experts", "weights", "restore", MANIFEST_NAME)
_MOST_POINTER_BYTES: Final = 1024


def find_side_files(root: Path) -> tuple[str, ...]:
    """Return what a converted directory keeps beside weights, relative to `root`, sorted.

    Raises
    ------
    SourceError
        A file cannot be kept, or is a link that leads out of the checkpoint.
    """
    return tuple(sorted(_side_files(root)))


def warnings_of_pointers(root: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence on what `git lfs pull` has not fetched yet."""
    pointers = [name for name in names if _is_pointer(root / name)]
    if pointers:
        yield (
            f"{len(pointers)} files are Git LFS pointers, not the files themselves, as "
            f"`{pointers[0]}`; `git lfs pull` fetches them"
        )


def _side_files(root: Path) -> Iterator[str]:
    top = root.resolve()
    seen = {top}
    for folder, folders, names in os.walk(root, followlinks=True):
        kept = []
        for name in sorted(folders):
            path = Path(folder) / name
            if name.startswith(".") or _is_output(path) or path.resolve() in seen:
                continue
            _check_link(path, top)
            seen.add(path.resolve())  # a link to a folder above would never end
            kept.append(name)
        folders[:] = kept
        for name in names:
            if is_side_file(name):
                path = Path(folder) / name
                _check_side_file(path, str(path.relative_to(root)))
                _check_link(path, top)
                yield str(path.relative_to(root))


def _is_output(folder: Path) -> bool:
    """Say whether a folder below a checkpoint is an output of ours, whole or not."""
    return (folder / MANIFEST_NAME).exists() or (folder / ".moeconv").is_dir()


def is_side_file(name: str) -> bool:
    """Say whether a file, by its name, is neither weights nor an index of them nor hidden."""
    is_weight = name.endswith(WEIGHT_SUFFIXES)
    is_index = name.removesuffix(".index.json").endswith(WEIGHT_SUFFIXES)
    return not (is_weight or is_index or name.startswith("."))


def check_name(name: str) -> None:
    """Refuse a side file that a converted directory cannot keep under its name.

    Raises
    ------
    SourceError
        It is no text, not a name everywhere, or would lie where converted files go.
    """
    if not name.isprintable() or not is_text(name):
        _refuse(name, "has a name that is no printable text")
    if not is_below(name):
        _refuse(name, "has a name that leads elsewhere on Windows")
    if Path(name).parts[0].casefold() in _RESERVED:  # some disks take both for the same
        _refuse(name, "would lie where converted files go")


def _check_side_file(path: Path, name: str) -> None:
    check_name(name)
    if not path.is_file():
        _refuse(name, "is no regular file")
    if not os.access(path, os.R_OK):
        _refuse(name, "cannot be read")


def _refuse(name: str, problem: str) -> NoReturn:
    message = f"the side file `{ascii(name)[1:-1]}` of the checkpoint {problem}"
    raise SourceError(message, hint="every file but weights is kept; move this one away")


def _check_link(path: Path, top: Path) -> None:
    """Refuse what lies elsewhere, but for the blobs of the Hub's cache: it would be published."""
    found = path.resolve()
    is_blob = found.parent.name == "blobs" and found.parent.parent.name.startswith("models--")
    if not (found.is_relative_to(top) or is_blob):
        message = f"`{path}` of the checkpoint is a link to `{found}`, outside of it"
        raise SourceError(message, hint="put a copy in place of the link, if it belongs here")


def _is_pointer(path: Path) -> bool:
    if path.stat().st_size > _MOST_POINTER_BYTES:
        return False
    return read_regular(path, _MOST_POINTER_BYTES).startswith(POINTER)
