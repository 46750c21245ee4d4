"""The command line: parse, make one call, report."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final

import typer

from moeconv.errors import MoeconvError

app = typer.Typer(
    name="moeconv",
    help="Convert Mixture-of-Experts checkpoints into the layouts that serving kernels read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

_EXIT_CODES: Final = (
    "Exit codes: 0 done, 2 usage, 3 source, 4 unsupported, 5 output, 6 verification, "
    "130 interrupted (run the same command again to resume)."
)

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def _size(text: str) -> int:
    """Parse `5GB`, `1GiB` or `4096`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    unit = {**_UNITS, **_BINARY}.get(match.group(2)) if match else None
    if match is None or unit is None:
        message = f"{text!r} is no size; write it as 5GB, 512MiB or a number of bytes"
        raise typer.BadParameter(message)
    return int(float(match.group(1)) * unit)


def _layers(text: str) -> tuple[int, int]:
    """Parse `0-3` or `7`."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if match is None or int(match.group(2) or match.group(1)) < int(match.group(1)):
        message = f"{text!r} is no range of layers; write it as 0-3"
        raise typer.BadParameter(message)
    return int(match.group(1)), int(match.group(2) or match.group(1))


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


@app.command(epilog=f"Example: `moeconv trtllm ./Qwen3-30B-A3B --out ./converted`\n\n{_EXIT_CODES}")
def trtllm(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Directory of a BF16 MoE checkpoint.")
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(help="Output directory.", show_default="./<name>-trtllm-bf16"),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Make the file for one tensor-parallel size, in the engine's own order.",
            show_default="one file for every size",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:<n>; the bytes are the same.")
    ] = "auto",
    max_host_memory: Annotated[
        int, typer.Option(parser=_size, metavar="SIZE", help="Bound on all buffers together.")
    ] = "1GiB",  # type: ignore[assignment]
    max_shard_size: Annotated[
        int, typer.Option(parser=_size, metavar="SIZE", help="Largest output file.")
    ] = "5GB",  # type: ignore[assignment]
    layers: Annotated[
        tuple[int, int] | None,
        typer.Option(
            parser=_layers,
            metavar="A-B",
            help="Convert only these layers, for a trial; readers refuse the result unless asked.",
            show_default="all",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Threads that read, lay out and write.")] = 2,
    family: Annotated[
        str | None,
        typer.Option(help="Take the names of this family.", show_default="by model_type"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and write nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier moeconv directory at --out.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines to stdout, for machines.")
    ] = False,
) -> None:
    """Convert BF16 experts to the block layout of FlashInfer's TRTLLM MoE kernel.

    One output serves every tensor- and expert-parallel size whose share of the intermediate size
    is a multiple of 64. The same command resumes an interrupted run.
    """
    from moeconv.commands import Options, run_convert

    run_convert(
        Options(
            source=source,
            out=out,
            layout="trtllm-bf16",
            tp=tp,
            device=device,
            max_host_bytes=max_host_memory,
            max_shard_bytes=max_shard_size,
            layers=layers,
            workers=workers,
            family=family,
            dry_run=dry_run,
            overwrite=overwrite,
            as_json=as_json,
        )
    )


@app.command(
    epilog="Example: `moeconv verify ./converted --read-data --source ./Qwen3-30B-A3B`\n\n"
    + _EXIT_CODES
)
def verify(
    converted: Annotated[Path, typer.Argument(metavar="OUT", help="A converted directory.")],
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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:<n>.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Check a converted directory: structure always, digests and source if asked."""
    from moeconv.commands import run_verify

    run_verify(converted, read_data=read_data, source=source, device=device, as_json=as_json)


@app.command(epilog=f"Example: `moeconv rank ./converted --tp 2 --tp-rank 0`\n\n{_EXIT_CODES}")
def rank(
    converted: Annotated[Path, typer.Argument(metavar="OUT", help="A converted directory.")],
    *,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    tp_rank: Annotated[int, typer.Option(min=0, help="Tensor-parallel rank.")] = 0,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel size.")] = 1,
    ep_rank: Annotated[int, typer.Option(min=0, help="Expert-parallel rank.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines to stdout, for machines.")
    ] = False,
) -> None:
    """Show what one rank reads: its tensors, their final shapes, and how many bytes of disk."""
    from moeconv.commands import run_rank

    run_rank(converted, tp=(tp, tp_rank), ep=(ep, ep_rank), as_json=as_json)


def main() -> None:
    """Run the command line; the one place where an error becomes an exit code."""
    try:
        app()
    except MoeconvError as problem:
        from moeconv import report

        report.error(problem)
        sys.exit(problem.exit_code)
