"""Do the sessions of the pages come out as they are shown, line by line?

A session is a `console` block: what follows `$ ` is run, all of a page in one folder, and the rest
is what it prints at 80 columns. Rows of the machine are not compared.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONG = ("docs/tutorial.md", "docs/how-to/convert-fp4.md")
PAGES = ("README.md", *(pytest.param(page, marks=pytest.mark.slow) for page in LONG))
_ROWS = "time|peak memory|buffers|free disk"
_OF_THE_MACHINE = re.compile(rf"^(?:{_ROWS})  .*\n(?: {{8}}.*\n)*", re.MULTILINE)


def _sessions(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the commands of a page, each with what it prints."""
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        yield from re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)


def _run(command: str, folder: Path) -> str:
    program, *arguments = shlex.split(command)
    start = {"python": [sys.executable], "moeconv": [sys.executable, "-m", "moeconv"]}[program]
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    env = os.environ | {"COLUMNS": "80", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = subprocess.run(
        [*start, *arguments],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


@pytest.mark.parametrize("page", PAGES)
def test_a_session_comes_out_as_shown(page: str, tmp_path: Path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    sessions = list(_sessions(ROOT / page))
    assert len(sessions) > 2
    for command, shown in sessions:
        printed = _run(command, tmp_path)
        assert _OF_THE_MACHINE.sub("", printed) == _OF_THE_MACHINE.sub("", shown), command
