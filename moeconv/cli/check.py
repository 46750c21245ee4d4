"""The verbs for a converted directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeconv.cli.options import EXIT_CODES

verbs = typer.Typer()


@verbs.command(
    epilog="Example: `moeconv verify ./converted --read-data --source ./Qwen3-30B-A3B`\n\n"
    + EXIT_CODES
)
def verify(
    converted: Annotated[
        str,
        typer.Argument(
            metavar="OUT", help="A converted directory, or ORG/NAME[@REVISION] on the Hub."
        ),
    ],
    *,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read every byte and compare all digests.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="SRC",
            help="Invert every tensor and compare it with this checkpoint, byte for byte.",
            show_default="no comparison",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Check a converted directory: structure always, digests and source if asked.

    On the Hub, sizes and SHA-256 are those that it has of its files, and headers are read by range.
    """
    from moeconv.commands import run_verify

    run_verify(converted, read_data=read_data, source=source, device=device, as_json=as_json)


@verbs.command(epilog=f"Example: `moeconv rank ./converted --tp 2 --tp-rank 0`\n\n{EXIT_CODES}")
def rank(
    converted: Annotated[Path, typer.Argument(metavar="OUT", help="A converted directory.")],
    *,
    tp: Annotated[int, typer.Option(min=1, help="Parts that each expert is cut into (TP).")] = 1,
    tp_rank: Annotated[int, typer.Option(min=0, help="Tensor-parallel rank.")] = 0,
    ep: Annotated[int, typer.Option(min=1, help="Shares of the experts (EP).")] = 1,
    ep_rank: Annotated[int, typer.Option(min=0, help="Expert-parallel rank.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines to stdout, for machines.")
    ] = False,
) -> None:
    """Show what one rank reads: its tensors, their final shapes, and how many bytes of disk.

    The sizes are those of the expert layers: with both above 1 a rank holds some of the experts,
    and of each of them a part.
    """
    from moeconv.commands import run_rank

    run_rank(converted, tp=(tp, tp_rank), ep=(ep, ep_rank), as_json=as_json)


@verbs.command(
    epilog="Example: `moeconv seal ./converted`\n\n"
    "Exit codes: 0 done, 2 usage, 5 shards are missing, 6 broken notes."
)
def seal(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A directory that shares were written to.")
    ],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Make one model of the shares that `--shard-of` wrote, or say which shards are missing.

    Shares of several machines are joined by copying their directories over each other first, with
    their hidden files (as `rsync -a` does). The source is not needed.
    """
    from moeconv.commands import run_seal

    run_seal(out, as_json=as_json)
