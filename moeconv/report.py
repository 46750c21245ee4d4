"""What does the person see? Progress, tables and errors; the only place that imports Rich.

Progress and messages go to stderr; stdout is for data that could be piped.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from rich import markup
from rich.console import Console
from rich.filesize import decimal
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
from rich.text import Text

if TYPE_CHECKING:
    from moeconv.errors import MoeconvError

Say: TypeAlias = "Callable[[str], object]"
Rows: TypeAlias = "Sequence[tuple[str, str]]"

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_TONES: Final = {"yes": "green", "yes, but": "yellow", "no": "red"}
_COLOURS: Final = ("blue", "yellow", "green", "magenta", "cyan", "red", "white", "bright_black")

_MOST_CHARS: Final = 1000

err = Console(stderr=True, highlight=False, emoji=False)
out = Console(highlight=False, emoji=False)
_alarm = Console(stderr=True, highlight=False, emoji=False)
_name = [""]


def lead(label: str, *, leads: bool) -> None:
    """Let one of several processes speak for all; another says only what went wrong, and its name.

    Parameters
    ----------
    label
        What to call this process, as `2/4`.
    leads
        Whether it is the one.
    """
    err.quiet = out.quiet = not leads
    _name.append("" if leads else f"[{label}] ")


def escape(text: str) -> str:
    """Return a text as it can be shown: names come from files, and may hold a terminal's codes."""
    if len(text) > 2 * _MOST_CHARS:
        text = f"{text[:_MOST_CHARS]} … {text[-_MOST_CHARS:]}"
    return markup.escape("".join(c if c.isprintable() or c == "\n" else "�" for c in text))


def size(nbytes: float) -> str:
    """Return a size in decimal units, as `4.8 GB`."""
    return decimal(int(nbytes))


def rate(bytes_per_s: float) -> str:
    """Return a rate in decimal units, as `4.8 GB/s`."""
    return f"{size(bytes_per_s)}/s"


def duration(seconds: float) -> str:
    """Return a time in words, as `3 min`."""
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    if seconds < _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.1f} h"


def progress() -> Progress:
    """Return a byte progress bar with rate and time left, silent where stderr is no terminal."""
    return Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("[cyan]left"),
        console=err,
        transient=True,
        disable=err.quiet or not err.is_terminal or err.is_dumb_terminal,
    )


@contextlib.contextmanager
def waiting() -> Iterator[Say]:
    """Show what is being done, one thing at a time; silent where stderr is no terminal."""
    with err.status("") as status:
        yield status.update


def count(number: int, noun: str) -> str:
    """Return a number of things, as `1 shard` or `2 shards`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(title: str, rows: Rows, *, commands: Rows = (), to_stdout: bool = False) -> None:
    """Print a two-column table, and below it commands, each whole in a line to be copied."""
    rows, commands = tuple(rows), tuple(commands)
    console = out if to_stdout else err
    width = max((len(name) for name, _ in (*rows, *commands)), default=0)
    grid = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    grid.add_column(style="dim", no_wrap=True, min_width=width)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(escape(name), escape(value))
    if title or rows:
        _print(console, grid)
    for name, command in commands:
        console.print(f"[dim]{escape(name.ljust(width))}[/dim]  {escape(command)}", soft_wrap=True)


def _print(console: Console, grid: Table) -> None:
    """Print a table without the blanks that fill its last column."""
    with console.capture() as captured:
        console.print(grid)
    console.out(*(line.rstrip() for line in captured.get().splitlines()), sep="\n", highlight=False)


def grid(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, wraps: bool = False
) -> None:
    """Print a table with a header to stdout; the first column folds, or each one wraps.

    A column of names, to copy from, is kept whole where a third of the terminal holds it.
    """
    shown = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        column = [row[i] for row in rows]
        is_names = not any(" " in cell for cell in column)
        longest = max((len(line) for cell in column for line in cell.splitlines()), default=0)
        keeps = is_names and longest <= out.width // 3 if wraps else i > 0
        shown.add_column(name, overflow="fold", no_wrap=keeps)
    for row in rows:
        shown.add_row(*(escape(cell) for cell in row))
    _print(out, shown)


def heading(text: str, word: str = "", rest: str = "") -> None:
    """Print a line over a section, with a coloured word if it gives an answer."""
    tone = _TONES.get(word, "bold")
    answer = f": [{tone}]{escape(word)}[/{tone}]{escape(rest)}" if word else ""
    out.print(f"\n[bold]{escape(text)}[/bold]{answer}")


def cells(label: str, line: Sequence[tuple[str, int]], gap: str = "") -> None:
    """Print short texts side by side, each in the colour of its number; -1 is none."""
    shown = Text(label)
    for text, colour in line:
        shown.append(text, style=_COLOURS[colour % len(_COLOURS)] if colour >= 0 else "dim")
        shown.append(gap)
    shown.rstrip()
    out.print(shown, soft_wrap=True)


def finding(message: str, hint: str | None, more: int, *, to_stdout: bool = False) -> None:
    """Print one of several problems."""
    like = f" (and {more} more like it)" if more else ""
    console = out if to_stdout else err
    console.print(f"[red]error:[/red] {escape(message + like)}", soft_wrap=True)
    if hint:
        console.print(f"  [cyan]hint:[/cyan] {escape(hint)}", soft_wrap=True)


def warn(message: str) -> None:
    """Print a warning."""
    err.print(f"[yellow]warning:[/yellow] {escape(message)}", soft_wrap=True)


def note(message: str) -> None:
    """Print a sentence."""
    err.print(escape(message), soft_wrap=True)


def text(message: str) -> None:
    """Print a paragraph to stdout."""
    out.print(escape(message))


def good(message: str) -> None:
    """Print that something is as it should be."""
    err.print(f"[green]{escape(message)}[/green]", soft_wrap=True)


def error(problem: MoeconvError) -> None:
    """Print an error, and its hint set apart."""
    start = escape(_name[-1])
    _alarm.print(f"{start}[red]error:[/red] {escape(str(problem))}", soft_wrap=True)
    if problem.hint:
        _alarm.print(f"\n[cyan]hint:[/cyan] {escape(problem.hint)}", soft_wrap=True)


def emit(value: Mapping[str, object]) -> None:
    """Print one JSON object, a line, to stdout."""
    if out.quiet:
        return
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
