"""Is a file the one that was written under its name? Its size and its header, before it is read.

Both follow from the manifest, so a file of another conversion, another layer or another tool is
known by its first bytes; damage inside it is not. Digests find that, where they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from moeconv.errors import VerifyError
from moeconv.output.contents import arranged, by_file
from moeconv.output.names import MANIFEST_NAME
from moeconv.tensors import BITS

if TYPE_CHECKING:
    from moeconv.output.files import Files
    from moeconv.output.manifest import Entry, Manifest


class Shards:
    """The files of an open directory, each compared with the manifest once."""

    def __init__(self, files: Files, manifest: Manifest) -> None:
        self._files = files
        self._manifest = manifest
        self._known: set[str] = set()

    def check(self, names: Iterable[str]) -> None:
        """Compare files of these names, if they were not compared before.

        Raises
        ------
        VerifyError
            One is missing, of another size, or begins in another way.
        """
        for name in sorted({*names} - self._known):
            self._check(name, self._held[name])
            self._known.add(name)

    @cached_property
    def _held(self) -> dict[str, list[Entry]]:
        return by_file(self._manifest)

    def _check(self, name: str, entries: list[Entry]) -> None:
        odd = next((entry for entry in entries if entry.dtype not in BITS), None)
        if odd:
            message = f"`{MANIFEST_NAME}` gives `{odd.name}` the unknown dtype {odd.dtype}"
            raise VerifyError(message, hint="the manifest is broken; convert again")
        expected = arranged(entries, self._manifest.plan_id)
        size, header = self._files.size(name), np.zeros(len(expected.header), np.uint8)
        if size >= header.nbytes:
            self._files.read(name, 0, header)
        found = header.tobytes()
        if (found, size) == (expected.header, expected.size):
            return
        message = (
            f"`{name}` is not the file that was written under this name: expected "
            f"{_words(expected.header, expected.size)}, found {_words(found, size)}"
        )
        raise VerifyError(message, hint="copy this file again; `moeconv verify` names all")


def _words(header: bytes, size: int) -> str:
    """Tell headers apart: whose shard, what comes first, and how long it is."""
    plan = re.search(rb'"moeconv plan":"(\w*)"', header)
    first = re.search(rb'\},"([^"]*)":\{', header)
    whose = f"plan {plan[1][:8].decode()}" if plan else "no plan of moeconv's"
    what = f" with `{first[1].decode(errors='replace')}` first" if first else ""
    return f"{whose}{what}, {size} bytes"
