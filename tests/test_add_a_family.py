"""The steps of docs/how-to/add-a-family.md, followed in a copy: one file and one word."""

from __future__ import annotations

import json

import pytest

from tests import adding
from tests.sources import noise, write_checkpoint

PAGE = adding.page("add-a-family.md")


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


def test_one_file_and_one_word(tmp_path, acorn):
    copy = adding.copy_package(tmp_path)
    before = adding.run(PAGE.commands[0], copy)
    assert before.returncode == 4
    assert "nor are its experts named as one of them names its own" in before.stdout

    file, imported, word = PAGE.code
    (copy / PAGE.path).write_text(file)
    init = copy / "moeconv/families/__init__.py"
    adding.insert(init, "from typing import TYPE_CHECKING, Final\n", imported)
    adding.insert(init, "FAMILIES: Final[tuple[Family, ...]] = (\n", word)

    for line in PAGE.commands[1:]:
        done = adding.run(line, copy)
        assert done.returncode == 0, done.stdout + done.stderr
    (line,) = adding.run(f"{PAGE.commands[0]} --json", copy).stdout.splitlines()
    seen = json.loads(line)
    (group,) = seen["groups"]
    assert (seen["checkpoint"]["family"], group["layers"]) == ("acorn-moe", "1-2")
    assert (group["experts"], group["hidden"], group["intermediate"]) == (4, 256, 128)


def test_the_row_is_written_as_the_others_are():
    assert adding.style(PAGE) == ""
