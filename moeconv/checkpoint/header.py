"""Read one safetensors header.

`safetensors.safe_open` is the reference parser and has the last word; the strict JSON read beside
it gives the byte ranges and refuses what `safe_open` lets through (a name given twice, of which it
would keep the last).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import safetensors
import xxhash

from moeconv.checkpoint.types import SourceFile, TensorRef
from moeconv.errors import SourceError
from moeconv.paths import open_regular
from moeconv.tensors import BITS, TensorSpec

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Json

PREFIX_BYTES: Final = 8
"""The header's length comes first, as a little-endian 64-bit integer."""

POINTER: Final = b"version "
"""What the file begins with that Git keeps in place of a large one."""

MAX_HEADER_BYTES: Final = 100_000_000
"""The largest header that safetensors 0.8.0 accepts."""

_PROBE_BYTES: Final = 1 << 16


def read_header(root: Path, name: str) -> tuple[SourceFile, list[TensorRef]]:
    """Return what the file `root/name` is and which tensors it holds.

    Raises
    ------
    SourceError
        The file is missing, shorter or longer than its header says, or no safetensors file.
    """
    path = root / name
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = _raw_header(file.read(PREFIX_BYTES), size, name)
            text = file.read(raw)
            refs = header_refs(text, name, size - PREFIX_BYTES - raw)
            probe = _probe(file.fileno(), PREFIX_BYTES + raw, size)
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except FileNotFoundError:
        message = f"`{name}` is not in `{root}`"
        raise SourceError(message, hint="fetch the missing shard, then run again") from None
    except (OSError, safetensors.SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        message = f"`{name}` cannot be read as safetensors: {reason}"
        raise SourceError(message, hint="fetch this file again") from error
    return SourceFile(name, size, hashlib.sha256(text).hexdigest(), probe), refs


def parse_header(name: str, size: int, start: bytes) -> tuple[SourceFile, list[TensorRef]]:
    """Return what a file of `size` bytes is whose first bytes, header and all, are `start`.

    Raises
    ------
    SourceError
        It is no safetensors file, or of another size than its header says.
    """
    raw = _raw_header(start[:PREFIX_BYTES], size, name)
    text = start[PREFIX_BYTES : PREFIX_BYTES + raw]
    refs = header_refs(text, name, size - PREFIX_BYTES - raw)
    # The reference parser wants a file of the right size; this one is a hole behind the header.
    fd = os.memfd_create(name.replace("/", "-"), os.MFD_CLOEXEC)
    try:
        os.write(fd, start[: PREFIX_BYTES + raw])
        os.ftruncate(fd, size)
        with safetensors.safe_open(f"/proc/self/fd/{fd}", framework="numpy"):
            pass
    except (OSError, safetensors.SafetensorError) as error:
        message = f"`{name}` cannot be read as safetensors: {error}"
        raise SourceError(message, hint="is it whole on the Hub?") from error
    finally:
        os.close(fd)
    return SourceFile(name, size, hashlib.sha256(text).hexdigest(), None), refs


def header_bytes(name: str, size: int, start: bytes) -> int:
    """Return how many bytes length and header of a file take, by its first bytes.

    Raises
    ------
    SourceError
        It is no safetensors file.
    """
    return PREFIX_BYTES + _raw_header(start[:PREFIX_BYTES], size, name)


def _raw_header(prefix: bytes, size: int, name: str) -> int:
    length = int.from_bytes(prefix, "little")
    if prefix == POINTER:
        message = f"`{name}` is a Git LFS pointer, not the file itself"
        raise SourceError(message, hint="run `git lfs pull` in the checkpoint")
    most = min(size - PREFIX_BYTES, MAX_HEADER_BYTES)
    if len(prefix) < PREFIX_BYTES or not len("{}") <= length <= most:
        message = f"`{name}` has no safetensors header: {size} bytes, header length {length}"
        raise SourceError(message, hint="the file is cut short or is no safetensors file")
    return length


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    table = dict(pairs)
    if len(table) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        message = f"header names {counts.most_common(1)[0][0]!r} twice"
        raise ValueError(message)
    return table


def header_refs(text: bytes, name: str, data_bytes: int) -> list[TensorRef]:
    """Return the tensors of the file `name`, whose header is `text`, before so many bytes of data.

    Raises
    ------
    SourceError
        The header is broken, or says more than the file has.
    """
    try:
        header = dict(json.loads(text, object_pairs_hook=_unique))
        header.pop("__metadata__", None)
        begin = PREFIX_BYTES + len(text)
        refs = [_ref(tensor, entry, name, begin) for tensor, entry in header.items()]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"`{name}` has a broken header: {error}"
        raise SourceError(message, hint="fetch this file again") from error
    _check_ranges(refs, name, PREFIX_BYTES + len(text), data_bytes)
    return refs


def _check_ranges(refs: list[TensorRef], name: str, begin: int, data_bytes: int) -> None:
    """Refuse tensors that end past the file, overlap or leave a hole, as the format does."""
    ranges = sorted((ref.begin, ref.begin + ref.spec.nbytes, ref.name) for ref in refs)
    at, data_end = begin, begin + data_bytes
    _, end, last = max(ranges, key=lambda it: it[1], default=(begin, begin, ""))
    if end > data_end:
        message = (
            f"`{name}` is shorter than its header says: expected {end} bytes, found "
            f"{data_end} (`{last}` ends past the file)"
        )
        raise SourceError(message, hint="the download was cut short; fetch this file again")
    for first, end, tensor in ranges:
        if first != at:
            what = "overlaps another tensor" if first < at else "follows a hole"
            message = f"`{name}` has a broken header: `{tensor}` {what}"
            raise SourceError(message, hint="fetch this file again")
        at = end
    if at != data_end:
        message = f"`{name}` is {data_end - at} bytes longer than its header says"
        raise SourceError(message, hint="fetch this file again")


def _ref(tensor: str, entry: dict[str, Json], name: str, data_begin: int) -> TensorRef:
    dtype = str(entry["dtype"])
    if dtype not in BITS:
        message = f"`{tensor}` has the unknown dtype {dtype}"
        raise ValueError(message)
    shape = _integers(entry["shape"])
    begin, end = _integers(entry["data_offsets"])
    spec = TensorSpec(dtype, shape)
    if min((*shape, begin)) < 0 or spec.bits != 8 * (end - begin):
        message = f"`{tensor}` is {spec}, but its bytes are [{begin}, {end})"
        raise ValueError(message)
    return TensorRef(tensor, spec, name, data_begin + begin)


def _integers(value: Json) -> tuple[int, ...]:
    if not isinstance(value, list):
        message = f"expected a list of integers, found {value!r}"
        raise TypeError(message)
    for item in value:
        if type(item) is not int:  # a bool is an int to isinstance
            message = f"expected an integer, found {item!r}"
            raise TypeError(message)
    return tuple(cast("list[int]", value))


def _probe(fd: int, begin: int, end: int) -> str:
    """Digest a few places of the data, so that two fine-tunes of one shape have two identities."""
    digest = xxhash.xxh3_128()
    middle = (begin + end) // 2
    for at in (begin, middle, max(begin, end - _PROBE_BYTES)):
        digest.update(os.pread(fd, min(_PROBE_BYTES, end - at), at))
    return digest.hexdigest()
