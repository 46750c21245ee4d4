"""Files that came through Xet: a folder that the real `hf_xet` reads and writes as its server.

Only one process may have it open, so with Xet the fake Hub runs in the process of the test.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_RECORD_BYTES = 48
_HAS_VERIFICATION = 1 << 31
_HAS_SHA256 = 1 << 30


class Cas:
    """What `hf_xet` was told to keep in the folder `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._hashes: dict[str, str] = {}

    @property
    def url(self) -> str:
        """What `hf_xet` takes for the address of a server."""
        return f"local://{self._root.resolve()}"

    def find(self, sha256: str) -> str | None:
        """Return the Xet hash of a file, by its SHA-256."""
        if sha256 not in self._hashes:
            for shard in self._root.glob("xet/xorbs/shards/*.mdb"):
                self._hashes.update(_hashes(shard.read_bytes()))
        return self._hashes.get(sha256)

    def read(self, sha256: str, size: int, begin: int, end: int) -> Iterator[bytes]:
        """Yield bytes `[begin, end)` of a file."""
        import hf_xet

        group = hf_xet.XetSession().new_download_stream_group(endpoint=self.url)
        info = hf_xet.XetFileInfo(self.find(sha256), size)
        if end > begin:
            yield from group.download_stream(info, start=begin, end=end)


def _hashes(shard: bytes) -> dict[str, str]:
    """Read an `.mdb` file, records of 48 bytes behind a header, as {SHA-256: Xet hash}."""
    table, at = {}, _RECORD_BYTES
    while at + _RECORD_BYTES <= len(shard) and shard[at : at + 32] != b"\xff" * 32:
        name = shard[at : at + 32]
        flags, count = struct.unpack_from("<II", shard, at + 32)
        at += _RECORD_BYTES * (1 + count * (2 if flags & _HAS_VERIFICATION else 1))
        if flags & _HAS_SHA256:
            table[_text(shard[at : at + 32])] = _text(name)
            at += _RECORD_BYTES
    return table


def _text(digest: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", digest))
