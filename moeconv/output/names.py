"""What are the files of a converted directory called, beside its shards?"""

from __future__ import annotations

from typing import Final

MANIFEST_NAME: Final = "moeconv.json"
WORK_FOLDER: Final = ".moeconv"

SOURCE_CARD: Final = "README.source.md"
"""Where the source's `README.md` is kept: a repository shows that name as the card of the copy."""


def kept_name(name: str) -> str:
    """Return where a converted directory keeps a side file of the source."""
    return SOURCE_CARD if name == "README.md" else name
