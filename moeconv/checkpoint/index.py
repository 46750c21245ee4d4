"""Open a checkpoint: config, index and every header, no tensor bytes, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import xxhash

from moeconv.checkpoint.local import LocalOrigin
from moeconv.checkpoint.sidefiles import WEIGHT_SUFFIXES
from moeconv.checkpoint.types import Checkpoint, Json, SourceFile, TensorRef
from moeconv.errors import SourceError, UnsupportedError
from moeconv.paths import is_below

if TYPE_CHECKING:
    from moeconv.checkpoint.origin import Origin

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
    origin = LocalOrigin(Path(source))
    try:
        origin.check()
        return open_origin(origin)
    except OSError as error:  # a name too long, a folder that may not be read, a disk that fails
        message = f"`{error.filename or source}` cannot be read: {error.strerror}"
        raise SourceError(message) from error


def open_origin(origin: Origin) -> Checkpoint:
    """Open a checkpoint, wherever it is.

    Raises
    ------
    SourceError
        Its config, a shard or the index is missing or contradicts the others.
    UnsupportedError
        It holds no safetensors weights.
    """
    config = config_of(origin)
    weight_map = _weight_map(origin)
    names = sorted(set(weight_map.values())) if weight_map else _loose_shards(origin)
    warnings: list[str] = []
    _warn_of_strays(origin, names, warnings)
    files: list[SourceFile] = []
    tensors: dict[str, TensorRef] = {}
    for file, refs in origin.headers(names):
        files.append(file)
        for ref in refs:
            if ref.name in tensors:
                _check_twin(origin, tensors[ref.name], ref, warnings)
            else:
                tensors[ref.name] = ref
    _check_index(weight_map, tensors, files, warnings)
    side_files = origin.side_files()
    return Checkpoint(
        origin=origin,
        name=origin.name,
        config=config,
        tensors=tensors,
        files=tuple(files),
        side_files=side_files,
        warnings=(*warnings, *origin.warnings(side_files)),
        indexes={name: len(origin.read(name, _MOST_JSON_BYTES)) for name in _indexes(origin)},
    )


def read_config(root: Path) -> dict[str, Json]:
    """Return `config.json` of a checkpoint, or of a converted one.

    Raises
    ------
    SourceError
        There is none, or it is broken.
    """
    return config_of(LocalOrigin(root))


def config_of(origin: Origin) -> dict[str, Json]:
    """Return the same, wherever it is.

    Raises
    ------
    SourceError
        There is none, or it is broken.
    """
    return _read_json(origin, "config.json")


def _read_json(origin: Origin, name: str) -> dict[str, Json]:
    data = origin.read(name, _MOST_JSON_BYTES)
    try:
        value = json.loads(data, object_pairs_hook=_unambiguous)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        message = f"`{name}` in `{origin.where}` cannot be read as JSON: {error}"
        raise SourceError(message) from error
    if not isinstance(value, dict):
        message = f"`{name}` in `{origin.where}` holds no JSON object: found {type(value).__name__}"
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


def _indexes(origin: Origin) -> list[str]:
    return [name for name in origin.top_names() if name.endswith(".safetensors.index.json")]


def _weight_map(origin: Origin) -> dict[str, str]:
    indexes = _indexes(origin)
    if not indexes:
        return {}
    usual = "model.safetensors.index.json"
    index = usual if usual in indexes else indexes[0]
    table = _read_json(origin, index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        message = f"`{index}` has no `weight_map` of names to files"
        raise SourceError(message)
    weight_map = cast("dict[str, str]", table)
    for file in sorted(set(weight_map.values())):
        if not is_below(file) or not file.endswith(".safetensors"):
            message = f"`{index}` names the file `{file}`, outside the checkpoint"
            raise SourceError(message, hint="only safetensors files below the directory are read")
    missing = [file for file in sorted(set(weight_map.values())) if not origin.holds(file)]
    if missing:
        found = sum(name.endswith(".safetensors") for name in origin.top_names())
        message = (
            f"`{index}` names {len(set(weight_map.values()))} shards, {len(missing)} of "
            f"them not in `{origin.where}` (found {found}); the first is `{missing[0]}`"
        )
        raise SourceError(message, hint="fetch the missing shards, or the index that fits these")
    return weight_map


def _loose_shards(origin: Origin) -> list[str]:
    top = origin.top_names()
    names = [name for name in top if name.endswith(".safetensors")]
    # Mistral's releases hold every tensor a second time, in one consolidated file.
    names = [name for name in names if not name.startswith("consolidated")] or names
    if not names:
        other = [name for name in top if name.endswith(WEIGHT_SUFFIXES)]
        message = f"`{origin.where}` holds no `*.safetensors` file"
        if other:
            message += f", only `{other[0]}`"
        raise UnsupportedError(message, hint="save the checkpoint as safetensors first")
    return names


def _warn_of_strays(origin: Origin, names: Iterable[str], warnings: list[str]) -> None:
    found = {name for name in origin.top_names() if name.endswith(".safetensors")}
    strays = sorted(found - set(names))
    if strays:
        warnings.append(f"{len(strays)} weight files are in no index and not read: `{strays[0]}`")


def _check_twin(origin: Origin, first: TensorRef, second: TensorRef, warnings: list[str]) -> None:
    """Allow a name in two shards only where both hold the same bytes."""
    where = f"`{first.name}` is in `{first.file}` and in `{second.file}`"
    if first.spec != second.spec or _digest(origin, first) != _digest(origin, second):
        message = f"{where}, with different bytes"
        raise SourceError(message, hint="remove the shard that does not belong here")
    warnings.append(f"{where}, with equal bytes; the first is used")


def _digest(origin: Origin, ref: TensorRef) -> str:
    digest = xxhash.xxh3_128()
    buffer = np.empty(min(_CHUNK_BYTES, ref.spec.nbytes), np.uint8)
    with closing(origin.open(0)) as ranges:
        for at in range(0, ref.spec.nbytes, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, ref.spec.nbytes - at)]
            done = ranges.read_range(ref.file, ref.begin + at, chunk)
            digest.update(chunk[:done])
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
