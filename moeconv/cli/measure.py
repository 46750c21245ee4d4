"""The command that measures."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moeconv.cli import completion
from moeconv.cli.options import parse_size

commands = typer.Typer()


class Part(StrEnum):
    """What to measure."""

    ALL = "all"
    KERNELS = "kernels"
    WHOLE = "whole"


@commands.command(
    epilog="Example: `moeconv bench --shape qwen3-235b --layout trtllm-bf16 --plot bench.svg`"
    "\n\nExit codes: 0 done, 2 usage, 4 no such layout, shape or device, 5 the disk is full or "
    "--plot cannot be written."
)
def bench(
    *,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYOUT",
            help="A layout of `moeconv list`; may be said several times.",
            show_default="trtllm-bf16, marlin-nvfp4, marlin-mxfp4",
            autocompletion=completion.layouts,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHAPE",
            help="qwen3-30b-a3b, qwen3-235b-a22b, gpt-oss-120b, deepseek-v3 or kimi-k2, or the "
            "beginning of one; may be said several times.",
            show_default="qwen3-30b-a3b",
            autocompletion=completion.shapes,
        ),
    ] = None,
    part: Annotated[
        Part, typer.Option(help="Kernels alone, whole conversions beside `cp`, or all.")
    ] = Part.ALL,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    size: Annotated[
        int,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Of the checkpoint that is made for a whole conversion; the disk holds it twice.",
            show_default="1GB",
        ),
    ] = 10**9,
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of a whole conversion, `cp` in turns with it.")
    ] = 3,
    folder: Annotated[
        Path,
        typer.Option(
            "--dir", exists=True, file_okay=False, help="Where to write; removed afterwards."
        ),
    ] = Path(),
    cold: Annotated[
        bool,
        typer.Option(
            "--cold",
            help="Drop the source of whole conversions from the page cache before each run.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw the figures too.", show_default="no picture"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Measure kernels and whole conversions here, beside what the machine can do.

    The ceiling of a kernel is a copy of the same bytes on the same device, that of a conversion
    `cp -r` of the same files and, on a GPU, a copy through it: read, up, back, write.
    """
    from moeconv.bench.run import LAYOUTS, Wanted, run_bench
    from moeconv.bench.shapes import SHAPES, find_shape

    shapes = tuple(find_shape(name) for name in shape) if shape else SHAPES[:1]
    layouts = tuple(layout) if layout else LAYOUTS
    kernels, whole = part != Part.WHOLE, part != Part.KERNELS
    wanted = Wanted(layouts, shapes, device, kernels, whole, size, repeats, folder, cold)
    run_bench(wanted, plot=plot, as_json=as_json)
