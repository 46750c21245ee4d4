"""The command line: parse, make one call, report."""

from __future__ import annotations

import io
import re
import sys
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final

import typer

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

_EXIT_CODES: Final = (
    "Exit codes: 0 done, 2 usage, 3 source, 4 unsupported, 5 output, 6 verification, "
    "130 interrupted (run the same command again to resume)."
)

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def _size(text: str) -> int:
    """Parse `5GB`, `1GiB` or `4096`."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?i?)b?", text.strip().lower())
    unit = {**_UNITS, **_BINARY}.get(match.group(2)) if match else None
    if match is None or unit is None:
        message = f"{text!r} is no size; write it as 5GB, 512MiB or a number of bytes"
        raise typer.BadParameter(message)
    if float(match.group(1)) == 0:
        message = f"{text!r} is no size; it must be above 0"
        raise typer.BadParameter(message)
    return int(float(match.group(1)) * unit)


def _layers(text: str) -> range:
    """Parse `0-3` or `7`; a tuple would make typer ask for two values."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if match is None or int(match.group(2) or match.group(1)) < int(match.group(1)):
        message = f"{text!r} is no range of layers; write it as 0-3"
        raise typer.BadParameter(message)
    return range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1)


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


Source = Annotated[
    Path, typer.Argument(metavar="SRC", help="Directory of a MoE checkpoint in safetensors.")
]
Tp = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Make the file for one tensor-parallel size, in the engine's own order.",
        show_default="one file for every size",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; the bytes are the same.")]
Memory = Annotated[
    int, typer.Option(parser=_size, metavar="SIZE", help="Bound on all buffers together.")
]
ShardSize = Annotated[int, typer.Option(parser=_size, metavar="SIZE", help="Largest output file.")]
Layers = Annotated[
    range | None,
    typer.Option(
        parser=_layers,
        metavar="A-B",
        help="Convert only these layers, for a trial; readers refuse the result unless asked.",
        show_default="all",
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="Threads that read, lay out and write.")]
FamilyName = Annotated[
    str | None,
    typer.Option("--family", help="Take the names of this family.", show_default="by model_type"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an earlier moeconv directory at --out.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines to stdout, for machines.")]

_MEMORY: Final = "1GiB"
_SHARD: Final = "5GB"


@app.command(epilog=f"Example: `moeconv trtllm ./Qwen3-30B-A3B --out ./converted`\n\n{_EXIT_CODES}")
def trtllm(
    source: Source,
    *,
    out: Annotated[
        Path | None,
        typer.Option(help="Output directory.", show_default="./<name>-trtllm-bf16"),
    ] = None,
    tp: Tp = None,
    device: Device = "auto",
    max_host_memory: Memory = _MEMORY,  # type: ignore[assignment]
    max_shard_size: ShardSize = _SHARD,  # type: ignore[assignment]
    layers: Layers = None,
    workers: Workers = 2,
    family: FamilyName = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Convert BF16 experts to the block layout of FlashInfer's TRTLLM MoE kernel.

    One output serves every tensor- and expert-parallel size whose share of the intermediate size
    is a multiple of 64. The same command resumes an interrupted run.
    """
    from moeconv.commands import Options, run_convert
    from moeconv.target import Wish

    options = Options(
        source=source,
        out=out,
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
    run_convert(options, Wish("trtllm"))


class Engine(StrEnum):
    """Whose bytes."""

    VLLM = "vllm"
    SGLANG = "sglang"


class ServingDtype(StrEnum):
    """What the engine computes in."""

    BF16 = "bfloat16"
    FP16 = "float16"


@app.command(
    "marlin-fp4",
    epilog=f"Example: `moeconv marlin-fp4 --nvfp4 ./Qwen3-30B-A3B-FP4`\n\n{_EXIT_CODES}",
)
def marlin_fp4(
    source: Source,
    *,
    nvfp4: Annotated[bool, typer.Option("--nvfp4", help="Take NVFP4 experts only.")] = False,
    mxfp4: Annotated[bool, typer.Option("--mxfp4", help="Take MXFP4 experts only.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Output directory.", show_default="./<name>-marlin-<nvfp4|mxfp4>"),
    ] = None,
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
    tp: Tp = None,
    device: Device = "auto",
    max_host_memory: Memory = _MEMORY,  # type: ignore[assignment]
    max_shard_size: ShardSize = _SHARD,  # type: ignore[assignment]
    layers: Layers = None,
    workers: Workers = 2,
    family: FamilyName = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Convert NVFP4 or MXFP4 experts to what the Marlin MoE kernel reads.

    The scheme is detected; a flag checks it. One output serves every expert-parallel size, and
    every tensor-parallel size whose share of the intermediate size is a multiple of 64. NVFP4
    bytes that depend on the expert-parallel size are not offered: the scale factor is the layer's.
    """
    from moeconv.commands import Options, run_convert
    from moeconv.target import Wish

    if nvfp4 and mxfp4:
        message = "give one of --nvfp4 and --mxfp4, or neither"
        raise typer.BadParameter(message)
    options = Options(
        source=source,
        out=out,
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
        max_lost_share=max_lost_scales / 100,
    )
    wish = Wish(
        "marlin-fp4",
        "nvfp4" if nvfp4 else "mxfp4" if mxfp4 else None,
        engine.value,
        serving_dtype.value if serving_dtype else None,
        reconciles=reconcile_scales,
    )
    run_convert(options, wish)


@app.command(
    epilog="Example: `moeconv inspect ./Qwen3-30B-A3B`\n\n"
    "Exit codes: 0 something can be made of it, 2 usage, 3 source, 4 unsupported, 6 a broken "
    "manifest."
)
def inspect(
    source: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Directory of a checkpoint, or a converted one."),
    ],
    *,
    family: FamilyName = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Show what a directory holds, what can become of it, and which engines take that.

    Reads headers and config only. Everything that stands against a conversion is listed at once.
    """
    from moeconv.sight import run_inspect

    run_inspect(source, family=family, as_json=as_json)


@app.command("list", epilog="Example: `moeconv list --json`\n\nExit codes: 0 done, 2 usage.")
def show_list(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Show the families, schemes, layouts and engines that moeconv knows."""
    from moeconv.catalogue import run_list

    run_list(as_json=as_json)


@app.command(
    epilog="Example: `moeconv explain trtllm-bf16 --hidden 2048 --intermediate 768 --tp 4`\n\n"
    "Exit codes: 0 done, 2 usage, 4 no such layout, or it does not take these sizes."
)
def explain(
    layout: Annotated[str, typer.Argument(metavar="LAYOUT", help="A layout of `moeconv list`.")],
    *,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size, H.")] = 2048,
    intermediate: Annotated[int, typer.Option(min=1, help="Intermediate size, I.")] = 768,
    experts: Annotated[int, typer.Option(min=1, help="Number of experts, E.")] = 128,
    gated: Annotated[bool, typer.Option(help="Whether experts have a gate.")] = True,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 2,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line to stdout, for machines.")
    ] = False,
) -> None:
    """Show shapes, row order, padding and the ranges that ranks read of a layout."""
    from moeconv.catalogue import run_explain
    from moeconv.layouts.layout import Geometry

    run_explain(layout, Geometry(experts, hidden, intermediate, gated), tp, as_json=as_json)


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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × or → shows ? for it
    try:
        app()
    except MoeconvError as problem:
        from moeconv import report

        report.error(problem)
        sys.exit(problem.exit_code)
