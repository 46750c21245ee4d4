"""Follow a page that says how to add something, in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Page:
    """A how-to page: its blocks of code to write, and its commands."""

    text: str

    @property
    def code(self) -> list[str]:
        """What the page says to write, in order: a file, then words for lists."""
        return [text for kind, text in self._blocks() if kind in {"python", "text"}]

    @property
    def commands(self) -> list[str]:
        """The command lines, in order."""
        lines = (text for kind, text in self._blocks() if kind == "console")
        return [line for text in lines for line in text.splitlines()]

    @property
    def path(self) -> str:
        """The file that the page says to make."""
        (path,) = re.findall(r"^`(moeconv/\w+/\w+\.py)`:$", self.text, re.MULTILINE)
        return str(path)

    def _blocks(self) -> list[tuple[str, str]]:
        return re.findall(r"```(\w*)\n(.*?)```", self.text, re.DOTALL)


def page(name: str) -> Page:
    """Return a page of docs/how-to."""
    return Page((ROOT / "docs/how-to" / name).read_text())


def copy_package(folder: Path) -> Path:
    """Copy the package into a folder, so that it can be changed there, with what is compiled."""
    shutil.copytree(ROOT / "moeconv", folder / "moeconv")
    return folder


def insert(path: Path, after: str, text: str) -> None:
    """Put a text behind the first place where another stands."""
    whole = path.read_text()
    assert after in whole, f"`{after}` is not in {path}"
    path.write_text(whole.replace(after, after + text, 1))


def run(line: str, copy: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command line of a page with the changed copy."""
    program, *rest = line.split()
    start = {"moeconv": ["-m", "moeconv"], "python": []}[program]
    return subprocess.run(
        [sys.executable, *start, *rest],
        cwd=cwd or copy,
        env={**os.environ, "PYTHONPATH": str(copy), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def style(page: Page) -> str:
    """Return what the formatter and the linter say to the page's file, at its place."""
    said = ""
    for command in (["format", "--check"], ["check", "--no-cache"]):
        line = [sys.executable, "-m", "ruff", *command, "--stdin-filename", page.path, "-"]
        done = subprocess.run(
            line, cwd=ROOT, input=page.code[0], capture_output=True, text=True, check=False
        )
        said += "" if done.returncode == 0 else done.stdout + done.stderr
    return said
