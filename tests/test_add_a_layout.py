"""The steps of docs/how-to/add-a-layout.md, followed in a copy: one file and one word."""

from __future__ import annotations

import shutil

from tests import adding
from tests.sources import Tiny, write_tiny

PAGE = adding.page("add-a-layout.md")


def test_one_file_and_one_word(tmp_path):
    write_tiny(tmp_path / "Oak-MoE", Tiny(hidden=128, intermediate=256))
    copy = adding.copy_package(tmp_path)
    file, imported, word = PAGE.code
    (copy / PAGE.path).write_text(file)
    init = copy / "moeconv/layouts/__init__.py"
    adding.insert(init, "from moeconv.layouts.marlin.rows import MARLIN_FP4\n", imported)
    adding.insert(init, "LAYOUTS: Final[tuple[Layout, ...]] = (\n", word)

    # The contract suite, beside the copy and under the project's settings.
    shutil.copytree(adding.ROOT / "tests", copy / "tests")
    shutil.copy(adding.ROOT / "pyproject.toml", copy)
    for line in PAGE.commands:
        done = adding.run(line, copy)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert "no tests ran" not in done.stdout


def test_the_file_is_written_as_the_others_are():
    assert adding.style(PAGE) == ""
