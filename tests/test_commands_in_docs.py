"""Every command line of the pages is one that the command line takes; every snippet compiles."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moeconv.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = {ROOT / "docs/reference/cli.md"}
runner = CliRunner()
STARTS = ("moeconv ", "$ moeconv ", "python -m moeconv ")


def blocks(text, kind):
    """The fenced blocks of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def shown(page):
    """The command lines of a page: in blocks, and in a sentence where they are whole."""
    text = re.sub(r"\\\n\s*", "", page.read_text())  # lines that go on
    fenced = "\n".join(blocks(text, r"\w*")).splitlines()
    indented = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    for line in (*fenced, *indented):
        if line.startswith(STARTS):
            yield line[line.index("moeconv ") :]
    yield from re.findall(r"`(moeconv [\w-]+ [^`]*(?:SRC|OUT|\./)[^`]*)`", text)


LINES = sorted({line for page in PAGES if page not in GENERATED for line in shown(page)})


def exit_code(line):
    """Let the command line take a line apart and show help, which comes before the verb."""
    args = shlex.split(line, comments=True)[1:]
    return runner.invoke(app, [*args, "--help"]).exit_code


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_one_that_is_taken(line):
    assert exit_code(line) == 0


def test_lines_are_found_and_wrong_ones_are_not_taken():
    assert len(LINES) > 25
    assert exit_code("moeconv trtllm SRC --no-such-flag") == 2
    assert exit_code("moeconv shuffle SRC") == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_snippets_compile(page):
    for number, code in enumerate(blocks(page.read_text(), "python")):
        compile(code, f"{page.name} snippet {number}", "exec")
