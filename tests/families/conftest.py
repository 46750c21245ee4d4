"""Checkpoints that transformers wrote, each once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.families import tiny


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Write a model type once, and return its directory and the model."""
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    done: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in done:
            root = tmp_path_factory.mktemp(name.replace("+", "-")) / "source"
            done[name] = (root, tiny.write(name, root, shard_size="400KB"))
        return done[name]

    return get
