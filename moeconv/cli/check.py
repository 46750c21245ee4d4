"""The commands for a converted directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from moeconv.cli.options import EXIT_CODES
from moeconv.share import parse_part

if TYPE_CHECKING:
    from moeconv.verification.digests import Subset

commands = typer.Typer()

_MOST_PARTS: Final = 999_999_999


def _subset(text: str) -> Subset:
    """Parse `2/5`; digests are imported when they are needed."""
    from moeconv.verification.digests import Subset

    part, of = parse_part(text)
    if not 1 <= part <= of <= _MOST_PARTS:
        message = f"{text!r} is no part; write it as 1/5"
        raise typer.BadParameter(message)
    return Subset(part, of)


@commands.command(
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
    subset: Annotated[
        str | None,
        typer.Option(
            "--read-data-subset",
            metavar="N/T",
            help="Read the N-th of T equal parts only; all T together are --read-data.",
            show_default="no data",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="SRC",
            help="Invert every tensor and compare it with this checkpoint, byte for byte; a "
            "sample is also laid out by FlashInfer or plain torch.",
            show_default="no comparison",
        ),
    ] = None,
    against_source: Annotated[
        bool,
        typer.Option(
            "--against-source",
            help="Compare the SHA-256 of the source's files with those that the Hub has of them.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Check a converted directory: structure always, digests and source if asked.

    On the Hub, sizes and SHA-256 are those that it has of its files, and headers are read by range.
    """
    from moeconv.commands.converted import run_compare_source, run_verify

    if read_data and subset is not None:
        raise typer.BadParameter("give one of --read-data and --read-data-subset, or neither")
    part = "1/1" if read_data else subset
    wanted = None if part is None else _subset(part)
    run_verify(converted, read_data=wanted, source=source, device=device, as_json=as_json)
    if against_source:
        run_compare_source(converted, as_json=as_json)


@commands.command(epilog=f"Example: `moeconv rank ./converted --tp 2 --tp-rank 0`\n\n{EXIT_CODES}")
def rank(
    converted: Annotated[Path, typer.Argument(metavar="OUT", help="A converted directory.")],
    *,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share each expert (TP).")] = 1,
    tp_rank: Annotated[int, typer.Option(min=0, help="Tensor-parallel rank.")] = 0,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that divide the experts (EP).")] = 1,
    ep_rank: Annotated[int, typer.Option(min=0, help="Expert-parallel rank.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines to stdout, for machines.")
    ] = False,
) -> None:
    """Show what one rank reads: its tensors, their final shapes, and how many bytes of disk.

    The sizes are those of the expert layers: with both above 1 a rank holds some of the experts,
    and of each of them a part.
    """
    from moeconv.commands.converted import run_rank

    run_rank(converted, tp=(tp, tp_rank), ep=(ep, ep_rank), as_json=as_json)


@commands.command(
    epilog="Example: `moeconv seal ./converted`\n\n"
    "Exit codes: 0 done, 2 usage, 5 shards are missing, 6 damage, or broken notes."
)
def seal(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A directory that shares were written to.")
    ],
    *,
    rechecks: Annotated[
        bool,
        typer.Option(
            "--recheck", help="Read finished shards again; those with other bytes are missing."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Make one model of the shares that `--shard-of` wrote, or say which shards are missing.

    Shares of several machines are joined by copying their directories over each other first, with
    their hidden files (as `rsync -a` does). The source is not needed.
    """
    from moeconv.commands.converted import run_seal

    run_seal(out, rechecks=rechecks, as_json=as_json)


@commands.command(
    epilog=f"Example: `moeconv restore ./converted --out ./Qwen3-30B-A3B`\n\n{EXIT_CODES}"
)
def restore(
    converted: Annotated[Path, typer.Argument(metavar="OUT", help="A converted directory.")],
    *,
    out: Annotated[Path, typer.Option("--out", help="Where to write the checkpoint.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Write the original checkpoint back: its files, byte for byte.

    Weight files that the conversion did not read are not among them. The same command goes on
    after an interruption; it reads again what is there, all of it once the directory is whole.
    """
    from moeconv.commands.converted import run_restore

    run_restore(converted, out, device=device, as_json=as_json)
