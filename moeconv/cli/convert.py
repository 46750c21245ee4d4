"""The commands that convert."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from moeconv.cli import completion
from moeconv.cli.options import EXIT_CODES, takes_options
from moeconv.commands.options import Options

if TYPE_CHECKING:
    from moeconv.planning.target import Wish

commands = typer.Typer()


def _run(options: Options, wish: Wish) -> None:
    """Convert, or show the plan, which needs nothing that converts or publishes."""
    if options.dry_run:
        from moeconv.commands.preview import preview

        preview(options, wish)
        return
    from moeconv.commands.convert import run_convert

    run_convert(options, wish)


@commands.command(
    epilog=f"Example: `moeconv trtllm ./Qwen3-30B-A3B --out ./converted`\n\n{EXIT_CODES}"
)
@takes_options
def trtllm(options: Options) -> None:
    """Convert BF16 experts to the block layout of FlashInfer's TRTLLM MoE kernel.

    One output serves every tensor- and expert-parallel size whose share of the intermediate size
    is a multiple of 64. The same command resumes an interrupted run.
    """
    from moeconv.planning.target import Wish

    _run(options, Wish("trtllm"))


class Engine(StrEnum):
    """Whose bytes."""

    VLLM = "vllm"
    SGLANG = "sglang"


class ServingDtype(StrEnum):
    """What the engine computes in."""

    BF16 = "bfloat16"
    FP16 = "float16"


@commands.command(
    "marlin-fp4",
    epilog=f"Example: `moeconv marlin-fp4 --nvfp4 ./Qwen3-30B-A3B-FP4`\n\n{EXIT_CODES}",
)
@takes_options
def marlin_fp4(
    options: Options,
    *,
    nvfp4: Annotated[bool, typer.Option("--nvfp4", help="Take NVFP4 experts only.")] = False,
    mxfp4: Annotated[bool, typer.Option("--mxfp4", help="Take MXFP4 experts only.")] = False,
    engine: Annotated[
        Engine, typer.Option(help="Whose Marlin: the two engines hold different bytes.")
    ] = Engine.VLLM,
    serving_dtype: Annotated[
        ServingDtype | None,
        typer.Option(help="What the engine computes in.", show_default="config.json's"),
    ] = None,
    reconcile_scales: Annotated[
        bool,
        typer.Option(
            "--reconcile-scales",
            help="Fold the larger of gate's and up's global scale into both, where they differ.",
        ),
    ] = False,
    max_lost_scales: Annotated[
        float,
        typer.Option(
            min=0,
            max=100,
            metavar="PERCENT",
            help="Refuse a layer that loses more of its block scales than this.",
        ),
    ] = 1.0,
) -> None:
    """Convert NVFP4 or MXFP4 experts to what the Marlin MoE kernel reads.

    The scheme is detected; a flag checks it. One output serves every expert-parallel size, and
    every tensor-parallel size whose share of the intermediate size is a multiple of 64. NVFP4
    bytes that depend on the expert-parallel size are not offered: the scale factor is the layer's.
    """
    from moeconv.planning.target import Wish

    if nvfp4 and mxfp4:
        message = "give one of --nvfp4 and --mxfp4, or neither"
        raise typer.BadParameter(message)
    wish = Wish(
        "marlin-fp4",
        "nvfp4" if nvfp4 else "mxfp4" if mxfp4 else None,
        engine.value,
        serving_dtype.value if serving_dtype else None,
        reconciles=reconcile_scales,
    )
    _run(replace(options, max_lost_share=max_lost_scales / 100), wish)


@commands.command(
    "convert",
    epilog="Example: `moeconv convert ./Qwen3-30B-A3B --layout trtllm-bf16 --out ./converted`"
    f"\n\n{EXIT_CODES}",
)
@takes_options
def convert(
    options: Options,
    *,
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="A layout of `moeconv list`.",
            autocompletion=completion.layouts,
        ),
    ],
) -> None:
    """Convert experts to a layout by its name.

    `trtllm` and `marlin-fp4` find the layout for a checkpoint; this is for one that has no command
    of its own, and for scripts.
    """
    from moeconv.planning.target import wish_for

    _run(options, wish_for(layout))
