"""The steps of docs/how-to/add-a-family.md, followed in a copy: one file and one word."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import noise, write_checkpoint

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/how-to/add-a-family.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
PYTHON = [text for kind, text in BLOCKS if kind in {"python", "text"}]
COMMANDS = [line for kind, text in BLOCKS if kind == "console" for line in text.splitlines()]


@pytest.fixture
def acorn(tmp_path):
    """The checkpoint of the page: one dense block, two with experts and a shared expert."""
    tensors = {}

    def add(name, *shape):
        tensors[name] = ("BF16", shape, noise(name, 2 * shape[0] * shape[1]))

    for block in range(3):
        add(f"decoder.blocks.{block}.attention.weight", 256, 256)
        for e in range(4 if block else 0):
            prefix = f"decoder.blocks.{block}.moe.experts.{e}"
            add(f"{prefix}.w_gate.weight", 128, 256)
            add(f"{prefix}.w_in.weight", 128, 256)
            add(f"{prefix}.w_out.weight", 256, 128)
        add(f"decoder.blocks.{block}.moe.shared.w_in.weight", 512, 256)
    config = {
        "model_type": "acorn_moe",
        "n_blocks": 3,
        "n_dense_blocks": 1,
        "n_experts": 4,
        "width": 256,
        "expert_width": 128,
    }
    return write_checkpoint(tmp_path / "Acorn-MoE", tensors, config)


@pytest.fixture
def copy(tmp_path, acorn):
    """A copy of the package, in which a person may write."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "moeconv", tmp_path / "moeconv", ignore=ignored)
    return tmp_path


def moeconv(line, cwd):
    verb, *rest = line.split()
    assert verb == "moeconv"
    return subprocess.run(
        [sys.executable, "-m", "moeconv", *rest],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(cwd), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_file_and_one_word(copy):
    before = moeconv(COMMANDS[0], copy)
    assert before.returncode == 4
    assert "nor are its experts named as one of them names its own" in before.stdout

    file, imported, word = PYTHON
    (path,) = re.findall(r"^`(moeconv/families/\w+\.py)`:$", PAGE, re.MULTILINE)
    (copy / path).write_text(file)
    init = copy / "moeconv/families/__init__.py"
    text = init.read_text()
    text = text.replace("\nif TYPE_CHECKING:", f"{imported}\nif TYPE_CHECKING:", 1)
    head = "FAMILIES: Final[tuple[Family, ...]] = (\n"
    text = text.replace(head, head + word, 1)
    init.write_text(text)

    for line in COMMANDS[1:]:
        done = moeconv(line, copy)
        assert done.returncode == 0, done.stdout + done.stderr
    (line,) = moeconv(f"{COMMANDS[0]} --json", copy).stdout.splitlines()
    seen = json.loads(line)
    (group,) = seen["groups"]
    assert (seen["checkpoint"]["family"], group["layers"]) == ("acorn-moe", "1-2")
    assert (group["experts"], group["hidden"], group["intermediate"]) == (4, 256, 128)


def test_the_row_is_written_as_the_others_are(tmp_path):
    path = tmp_path / "acorn_moe.py"
    path.write_text(PYTHON[0])
    pytest.importorskip("ruff")
    settings = str(ROOT / "pyproject.toml")
    command = [sys.executable, "-m", "ruff", "format", "--check", "--config", settings, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
