"""The command line: parse, make one call, report."""

from __future__ import annotations

import sys
from importlib import metadata
from itertools import pairwise
from typing import Annotated

import typer

from moeconv.cli import check, convert, look, measure, publish
from moeconv.cli.streams import take_over
from moeconv.errors import MoeconvError

app = typer.Typer(
    name="moeconv",
    help="Convert Mixture-of-Experts checkpoints into the layouts that serving kernels read.",
    epilog=(
        "Start with `moeconv inspect SRC`, then run what it says, with `--dry-run` first; then "
        "`moeconv verify OUT --read-data --source SRC`."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for part in (convert, look, check, publish, measure):
    app.add_typer(part.commands)


def _version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"moeconv {metadata.version('moeconv')}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version


def _check_arguments(said: list[str]) -> None:
    """Refuse an empty argument, as a path the current directory, and numbers in other digits."""
    for before, argument in pairwise(said):
        number = argument.partition("=")[2] if argument.startswith("--") else argument
        if number.isdecimal() and not number.isascii():
            typer.echo(f"Error: `{number}` is no number here; write it with 0 to 9", err=True)
            sys.exit(2)
        option = before if argument == "" else argument.removesuffix("=")
        if argument == "" or (argument.startswith("--") and option != argument):
            typer.echo(f"Error: the argument after `{option}` is empty", err=True)
            sys.exit(2)


def main() -> None:
    """Run the command line; the one place where an error becomes an exit code."""
    _check_arguments(sys.argv)
    try:
        take_over()
        app()
    except MoeconvError as problem:
        from moeconv import report

        report.error(problem)
        sys.exit(problem.exit_code)
