"""The command that publishes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeconv.cli.options import CREATE_PR, EXIT_CODES, PRIVATE, REVISION, parse_repository

commands = typer.Typer()


@commands.command(
    epilog=f"Example: `moeconv push ./converted my-org/Qwen3-30B-A3B-trtllm`\n\n{EXIT_CODES}"
)
def push(
    converted: Annotated[Path, typer.Argument(metavar="OUT", help="A converted directory.")],
    repository: Annotated[
        str,
        typer.Argument(
            metavar="ORG/NAME", parser=parse_repository, help="A model repository on the Hub."
        ),
    ],
    *,
    private: Annotated[bool, PRIVATE] = False,
    revision: Annotated[str, REVISION] = "main",
    create_pr: Annotated[bool, CREATE_PR] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Publish a converted directory on the Hub: all of it appears in one commit, or nothing does.

    The same command goes on after an interruption, and sends nothing twice.
    """
    from moeconv.commands.push import run_push
    from moeconv.output.hub import Destination

    destination = Destination(repository, revision, private, create_pr)
    run_push(converted, destination, dry_run=dry_run, as_json=as_json)
