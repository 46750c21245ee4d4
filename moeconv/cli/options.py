"""What can be said to a verb: options that several verbs share, and how their texts are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import typer

EXIT_CODES: Final = (
    "Exit codes: 0 done, 2 usage, 3 source, 4 unsupported, 5 output, 6 verification, "
    "130 interrupted (run the same command again to resume)."
)

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def parse_size(text: str) -> int:
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


def parse_layers(text: str) -> range:
    """Parse `0-3` or `7`; a tuple would make typer ask for two values."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if match is None or int(match.group(2) or match.group(1)) < int(match.group(1)):
        message = f"{text!r} is no range of layers; write it as 0-3"
        raise typer.BadParameter(message)
    return range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1)


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
    int, typer.Option(parser=parse_size, metavar="SIZE", help="Bound on all buffers together.")
]
ShardSize = Annotated[
    int, typer.Option(parser=parse_size, metavar="SIZE", help="Largest output file.")
]
Layers = Annotated[
    range | None,
    typer.Option(
        parser=parse_layers,
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

DEFAULT_MEMORY: Final = "1GiB"
DEFAULT_SHARD: Final = "5GB"
