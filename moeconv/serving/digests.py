"""Is it still what was written? The digest of each whole expert, against the manifest's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import xxhash

from moeconv.errors import VerifyError
from moeconv.serving.host import Staging
from moeconv.serving.runs import expert_bytes, held
from moeconv.serving.steps import each

if TYPE_CHECKING:
    from moeconv.output.files import Files
    from moeconv.output.manifest import TensorEntry
    from moeconv.serving.rank import RankTensor


def check(files: Files, tensors: Iterable[RankTensor], threads: int, slot: int) -> None:
    """Read every expert of the tensors whole, through a buffer of `slot` bytes a thread.

    Raises
    ------
    VerifyError
        A file is short, or a digest differs.
    """
    staging = Staging(slot)
    each(threads, _experts(tensors), lambda item: _check(files, staging, *item))


def _experts(tensors: Iterable[RankTensor]) -> Iterator[tuple[TensorEntry, int]]:
    for tensor in tensors:
        for entry, experts in held(tensor):
            for expert in experts:
                yield entry, expert


def _check(files: Files, staging: Staging, entry: TensorEntry, expert: int) -> None:
    """Compare the digest of one whole stored expert."""
    size, buffer = expert_bytes(entry), staging.buffer()
    begin, digest = entry.begin + (expert - entry.first) * size, xxhash.xxh3_128()
    for at in range(0, size, max(buffer.nbytes, 1)):
        chunk = buffer[: min(buffer.nbytes, size - at)]
        files.read(entry.file, begin + at, chunk)
        digest.update(chunk)
    found, expected = digest.hexdigest(), entry.xxh3[expert - entry.first]
    if found != expected:
        message = (
            f"expert {expert} of `{entry.name}` in `{entry.file}` is damaged: expected "
            f"XXH3 {expected}, found {found}"
        )
        raise VerifyError(message, hint="copy this file again; `moeconv verify` names all")
