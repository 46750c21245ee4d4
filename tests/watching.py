"""Watch a directory while something else works there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self


class Disk:
    """The most that a directory took, looked at all the time."""

    def __init__(self, root: Path) -> None:
        self._root, self._over, self.most_bytes = root, threading.Event(), 0
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.most_bytes = max(self.most_bytes, sum(self._sizes()))

    def _sizes(self) -> Iterator[int]:
        for folder, _, names in os.walk(self._root):
            for name in names:
                try:
                    yield (Path(folder) / name).lstat().st_blocks * 512
                except FileNotFoundError:
                    continue
