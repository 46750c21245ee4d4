"""The commands that show and write nothing."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from moeconv.cli import completion
from moeconv.cli.options import FAMILY

commands = typer.Typer()

_MOST: Final = 1 << 20
_MOST_RANKS: Final = 1 << 10


@commands.command(
    epilog="Example: `moeconv inspect ./Qwen3-30B-A3B`\n\n"
    "Exit codes: 0 something can be made of it, 2 usage, 3 source, 4 unsupported, 6 a broken "
    "manifest."
)
def inspect(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A MoE checkpoint as for `moeconv convert`, or a converted one; also on the Hub.",
        ),
    ],
    *,
    family: Annotated[str | None, FAMILY] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Show what SRC holds, what can become of it, and which engines take that.

    Reads headers and config only. Everything that stands against a conversion is listed at once.
    """
    from moeconv.commands.inspect import run_inspect

    run_inspect(source, family=family, as_json=as_json)


@commands.command("list", epilog="Example: `moeconv list --json`\n\nExit codes: 0 done, 2 usage.")
def show_list(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Show the families, schemes, layouts and engines that moeconv knows."""
    from moeconv.commands.catalogue import run_list

    run_list(as_json=as_json)


@commands.command(
    epilog="Example: `moeconv explain trtllm-bf16 --hidden 2048 --intermediate 768 --tp 4`\n\n"
    "Exit codes: 0 done, 2 usage, 4 no such layout, or it does not take these sizes."
)
def explain(
    layout: Annotated[
        str,
        typer.Argument(
            metavar="LAYOUT",
            help="A layout of `moeconv list`.",
            autocompletion=completion.layouts,
        ),
    ],
    *,
    hidden: Annotated[int, typer.Option(min=1, max=_MOST, help="Hidden size, H.")] = 2048,
    intermediate: Annotated[int, typer.Option(min=1, max=_MOST, help="Intermediate, I.")] = 768,
    experts: Annotated[int, typer.Option(min=1, max=_MOST, help="Number of experts, E.")] = 128,
    gated: Annotated[bool, typer.Option(help="Whether experts have a gate.")] = True,
    tp: Annotated[int, typer.Option(min=1, max=_MOST_RANKS, help="Tensor-parallel size.")] = 2,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Show shapes, row order, padding and the ranges that ranks read of a layout."""
    from moeconv.commands.catalogue import run_explain
    from moeconv.layouts.layout import Geometry

    run_explain(layout, Geometry(experts, hidden, intermediate, gated), tp, as_json=as_json)
