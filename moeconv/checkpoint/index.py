"""Open a local checkpoint: config, index and every header, no tensor bytes, no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, cast

import xxhash

from moeconv.checkpoint.header import POINTER, read_header
from moeconv.checkpoint.sidefiles import (
    MANIFEST_NAME,
    WEIGHT_SUFFIXES,
    find_side_files,
    warnings_of_pointers,
)
from moeconv.checkpoint.types import Checkpoint, Json, SourceFile, TensorRef
from moeconv.errors import SourceError, UnsupportedError
from moeconv.paths import is_below, open_regular, read_regular

_CHUNK_BYTES: Final = 1 << 24
_MOST_JSON_BYTES: Final = 1 << 27
"""Five times the index of 200,000 tensors; decoded, JSON takes up to twenty times its size."""


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open the checkpoint in the directory `source`.

    Raises
    ------
    SourceError
        The directory, its config, a shard or the index is missing or contradicts the others.
    UnsupportedError
        The directory is already converted, or holds no safetensors weights.
    """
    root = Path(source)
    try:
        return _open(root)
    except OSError as error:  # a name too long, a folder that may not be read, a disk that fails
        message = f"`{error.filename or root}` cannot be read: {error.strerror}"
        raise SourceError(message) from error


def _open(root: Path) -> Checkpoint:
    _check_root(root)
    config = read_config(root)
    weight_map = _weight_map(root)
    names = sorted(set(weight_map.values())) if weight_map else _loose_shards(root)
    warnings: list[str] = []
    _warn_of_strays(root, names, warnings)
    files: list[SourceFile] = []
    tensors: dict[str, TensorRef] = {}
    for name in names:
        file, refs = read_header(root, name)
        files.append(file)
        for ref in refs:
            if ref.name in tensors:
                _check_twin(root, tensors[ref.name], ref, warnings)
            else:
                tensors[ref.name] = ref
    _check_index(weight_map, tensors, files, warnings)
    side_files = find_side_files(root)
    return Checkpoint(
        root=root,
        name=root.resolve().name,
        config=config,
        tensors=tensors,
        files=tuple(files),
        side_files=side_files,
        warnings=(*warnings, *warnings_of_pointers(root, side_files)),
    )


def read_config(root: Path) -> dict[str, Json]:
    """Return `config.json` of a checkpoint, or of a converted one.

    Raises
    ------
    SourceError
        There is none, or it is broken.
    """
    return _read_json(root / "config.json")


def _check_root(root: Path) -> None:
    if not root.is_dir():
        hint = None
        if not root.exists() and root.parts and not root.is_absolute():
            hint = "give a local directory; download a Hub repository first (`hf download`)"
        message = f"`{root}` is not a directory"
        raise SourceError(message, hint=hint)
    if (root / MANIFEST_NAME).exists():
        message = f"`{root}` is already converted: it holds `{MANIFEST_NAME}`"
        hint = "converting twice would scramble the weights; point at the original checkpoint"
        raise UnsupportedError(message, hint=hint)
    if (root / ".moeconv").is_dir():
        message = f"`{root}` is a half-finished conversion: it holds `.moeconv/`"
        hint = "point at the original checkpoint; the same command resumes the conversion"
        raise UnsupportedError(message, hint=hint)


def _read_json(path: Path) -> dict[str, Json]:
    try:
        data = read_regular(path, _MOST_JSON_BYTES)
        if data.startswith(POINTER):
            message = f"`{path}` is a Git LFS pointer, not the file itself"
            raise SourceError(message, hint="run `git lfs pull` in the checkpoint")
        value = json.loads(data, object_pairs_hook=_unambiguous)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except FileNotFoundError:
        message = f"`{path.name}` is not in `{path.parent}`"
        raise SourceError(message, hint="is this a checkpoint directory?") from None
    except (ValueError, RecursionError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"`{path}` cannot be read as JSON: {reason}"
        raise SourceError(message) from error
    if not isinstance(value, dict):
        message = f"`{path}` holds no JSON object: found {type(value).__name__}"
        raise SourceError(message)
    return value


def _unambiguous(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Refuse a key that is given twice, unless the values are equal: which of them counts?"""
    table = dict(pairs)
    if len(table) != len(pairs):
        for key, value in pairs:
            if table[key] != value:
                message = f"it gives {key!r} twice, with different values"
                raise ValueError(message)
    return table


def _weight_map(root: Path) -> dict[str, str]:
    indexes = sorted(root.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        indexes = [
            path for path in indexes if path.name == "model.safetensors.index.json"
        ] or indexes
    if not indexes:
        return {}
    table = _read_json(indexes[0]).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        message = f"`{indexes[0].name}` has no `weight_map` of names to files"
        raise SourceError(message)
    weight_map = cast("dict[str, str]", table)
    for file in sorted(set(weight_map.values())):
        if not is_below(file) or not file.endswith(".safetensors"):
            message = f"`{indexes[0].name}` names the file `{file}`, outside the checkpoint"
            raise SourceError(message, hint="only safetensors files below the directory are read")
    missing = [file for file in sorted(set(weight_map.values())) if not (root / file).is_file()]
    if missing:
        found = len(list(root.glob("*.safetensors")))
        message = (
            f"`{indexes[0].name}` names {len(set(weight_map.values()))} shards, {len(missing)} of "
            f"them not in `{root}` (found {found}); the first is `{missing[0]}`"
        )
        raise SourceError(message, hint="fetch the missing shards, or the index that fits these")
    return weight_map


def _loose_shards(root: Path) -> list[str]:
    names = sorted(path.name for path in root.glob("*.safetensors"))
    # Mistral's releases hold every tensor a second time, in one consolidated file.
    names = [name for name in names if not name.startswith("consolidated")] or names
    if not names:
        other = sorted(path.name for path in root.iterdir() if path.suffix in WEIGHT_SUFFIXES)
        message = f"`{root}` holds no `*.safetensors` file"
        if other:
            message += f", only `{other[0]}`"
        raise UnsupportedError(message, hint="save the checkpoint as safetensors first")
    return names


def _warn_of_strays(root: Path, names: Iterable[str], warnings: list[str]) -> None:
    strays = sorted({path.name for path in root.glob("*.safetensors")} - set(names))
    if strays:
        warnings.append(f"{len(strays)} weight files are in no index and not read: `{strays[0]}`")


def _check_twin(root: Path, first: TensorRef, second: TensorRef, warnings: list[str]) -> None:
    """Allow a name in two shards only where both hold the same bytes."""
    where = f"`{first.name}` is in `{first.file}` and in `{second.file}`"
    if first.spec != second.spec or _digest(root, first) != _digest(root, second):
        message = f"{where}, with different bytes"
        raise SourceError(message, hint="remove the shard that does not belong here")
    warnings.append(f"{where}, with equal bytes; the first is used")


def _digest(root: Path, ref: TensorRef) -> str:
    digest = xxhash.xxh3_128()
    with os.fdopen(open_regular(root / ref.file), "rb") as file:
        for at in range(0, ref.spec.nbytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, ref.spec.nbytes - at)
            digest.update(os.pread(file.fileno(), size, ref.begin + at))
    return digest.hexdigest()


def _check_index(
    weight_map: dict[str, str],
    tensors: dict[str, TensorRef],
    files: list[SourceFile],
    warnings: list[str],
) -> None:
    if not weight_map:
        return
    lacking = sorted(name for name in weight_map if name not in tensors)
    if lacking:
        message = (
            f"the index names {len(lacking)} tensors that no shard holds; the first is "
            f"`{lacking[0]}`, expected in `{weight_map[lacking[0]]}`"
        )
        raise SourceError(message, hint="index and shards are of two versions; fetch both again")
    moved = sorted(name for name, file in weight_map.items() if tensors[name].file != file)
    if moved:
        name = moved[0]
        warnings.append(
            f"the index is stale: {len(moved)} tensors lie in other shards than it says, as "
            f"`{name}` in `{tensors[name].file}`"
        )
    omitted = sorted(set(tensors) - set(weight_map))
    if omitted:
        warnings.append(
            f"the index is stale: {len(omitted)} tensors of its {len(files)} shards are not in "
            f"it, as `{omitted[0]}`; they are kept"
        )
