"""The steps of docs/how-to/add-a-scheme.md, followed in a copy: one file and two words."""

from __future__ import annotations

import json

from tests import adding, runs
from tests.fp4.models import Model

PAGE = adding.page("add-a-scheme.md")
KNOWN = Model("mxfp4", experts=2, layers=1)


def renamed(tensors):
    """The names of the page in place of the known ones."""
    for name in list(tensors):
        for known, own in ((".weight_scale", ".qscales"), (".weight", ".qblocks")):
            if ".experts." in name and name.endswith(known):
                dtype, shape, data = tensors.pop(name)
                dtype = "F8_E8M0" if known == ".weight_scale" else dtype
                tensors[name.removesuffix(known) + own] = (dtype, shape, data)
                break


def test_one_file_and_two_words(tmp_path):
    KNOWN.write(tmp_path / "known")
    KNOWN.write(tmp_path / "Oak-MoE", renamed)
    copy = adding.copy_package(tmp_path)
    before = adding.run(PAGE.commands[0], copy)
    assert before.returncode == 4
    assert "stored in no scheme that is known" in before.stdout
    assert ".qblocks" in before.stdout

    file, imported, word, taken = PAGE.code
    (copy / PAGE.path).write_text(file)
    init = copy / "moeconv/schemes/__init__.py"
    adding.insert(init, "from typing import TYPE_CHECKING, Final\n", imported)
    adding.insert(init, "SCHEMES: Final[tuple[Scheme, ...]] = (\n", word)
    rows = copy / "moeconv/layouts/marlin/rows.py"
    old = '        schemes=("mxfp4", "mxfp4-float", "ct-mxfp4"),\n'
    assert rows.read_text().count(old) == 1
    rows.write_text(rows.read_text().replace(old, taken))

    for line in PAGE.commands[1:]:
        done = adding.run(line, copy)
        assert done.returncode == 0, done.stdout + done.stderr
    runs.invoke("marlin-fp4", tmp_path / "known", "--out", tmp_path / "expected")
    shards = sorted(path.name for path in (tmp_path / "expected/experts").iterdir())
    assert shards == sorted(path.name for path in (tmp_path / "converted/experts").iterdir())
    for shard in shards:
        one, other = (tmp_path / f"{name}/experts/{shard}" for name in ("expected", "converted"))
        assert one.read_bytes()[4096:] == other.read_bytes()[4096:]  # a header names its plan
    manifest = json.loads((tmp_path / "converted/moeconv.json").read_text())
    assert manifest["stacks"][0]["scheme"] == "oak-mxfp4"


def test_the_row_is_written_as_the_others_are():
    assert adding.style(PAGE) == ""
