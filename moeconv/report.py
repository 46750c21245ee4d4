"""What does the person see? Progress, tables and errors; the only place that imports Rich.

Progress and messages go to stderr; stdout is for data that could be piped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from moeconv.errors import MoeconvError

Rows: TypeAlias = "Sequence[tuple[str, str]]"

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)


def size(nbytes: float) -> str:
    """Return a size in decimal units, as `4.8 GB`."""
    return decimal(int(nbytes))


def progress() -> Progress:
    """Return a byte progress bar with rate and time left, silent where stderr is no terminal."""
    return Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


def table(title: str, rows: Rows, *, to_stdout: bool = False) -> None:
    """Print a two-column table."""
    grid = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(escape(name), escape(value))
    (out if to_stdout else err).print(grid)


def grid(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with a header to stdout."""
    shown = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        shown.add_column(name, overflow="fold", no_wrap=i > 0)
    for row in rows:
        shown.add_row(*(escape(cell) for cell in row))
    out.print(shown)


def warn(message: str) -> None:
    """Print a warning."""
    err.print(f"[yellow]warning:[/yellow] {escape(message)}", soft_wrap=True)


def note(message: str) -> None:
    """Print a sentence."""
    err.print(escape(message), soft_wrap=True)


def good(message: str) -> None:
    """Print that something is as it should be."""
    err.print(f"[green]{escape(message)}[/green]", soft_wrap=True)


def error(problem: MoeconvError) -> None:
    """Print an error, and its hint set apart."""
    err.print(f"[red]error:[/red] {escape(str(problem))}", soft_wrap=True)
    if problem.hint:
        err.print(f"\n[cyan]hint:[/cyan] {escape(problem.hint)}", soft_wrap=True)


def emit(value: Mapping[str, object]) -> None:
    """Print one JSON object, a line, to stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
