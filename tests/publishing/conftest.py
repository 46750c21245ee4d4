"""A source that has all that a copy takes over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import runs
from tests.publishing.pushes import (
    CARD,
    SIZE,
)
from tests.sources import Tiny, write_tiny


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = write_tiny(tmp_path / "source", Tiny(hidden=256))
    (root / "README.md").write_text(CARD)
    (root / "LICENSE").write_text("as you like")
    return root


@pytest.fixture
def plain(source: Path, tmp_path: Path) -> Path:
    runs.invoke("trtllm", source, "--out", tmp_path / "plain", *SIZE)
    return tmp_path / "plain"
