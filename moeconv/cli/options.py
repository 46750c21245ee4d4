"""What can be said to the commands that convert, each option once, and how its text is read."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, get_type_hints

import typer

from moeconv.cli import completion
from moeconv.commands.options import Options
from moeconv.counts import MOST_WORKERS
from moeconv.paths import is_there
from moeconv.share import WHOLE, Share, launched, parse_share

if TYPE_CHECKING:
    from typer.models import ParameterInfo

P = ParamSpec("P")

EXIT_CODES: Final = (
    "Exit codes: 0 done, 2 usage, 3 source, 4 unsupported, 5 output, 6 verification, "
    "130 interrupted (run the same command again to resume)."
)

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_MOST_BYTES: Final = 10**18
_BINARY: Final = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def parse_size(text: str | int) -> int:
    """Parse `5GB`, `1GiB` or `4096`; a default comes as the number it is."""
    if isinstance(text, int):
        return text
    pattern = r"(\d{1,99}(?:\.\d{1,99})?)\s*([kmgt]?i?)b?"
    match = re.fullmatch(pattern, text.strip().lower(), re.ASCII)
    unit = {**_UNITS, **_BINARY}.get(match.group(2)) if match else None
    if match is None or unit is None:
        message = f"{text!r} is no size; write it as 5GB, 512MiB or a number of bytes"
        raise typer.BadParameter(message)
    nbytes = int(float(match.group(1)) * unit)
    if not 0 < nbytes <= _MOST_BYTES:
        message = f"{text!r} is no size; it must be above 0, and at most 1000000TB"
        raise typer.BadParameter(message)
    return nbytes


def parse_layers(text: str) -> range:
    """Parse `0-3` or `7`; a tuple would make typer ask for two values."""
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip(), re.ASCII)
    if match is None or int(match.group(2) or match.group(1)) < int(match.group(1)):
        message = f"{text!r} is no range of layers; write it as 0-3"
        raise typer.BadParameter(message)
    return range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1)


def _parse_share(text: str) -> Share:
    """Parse `2/4`."""
    try:
        return parse_share(text)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None


def parse_repository(text: str) -> str:
    """Parse `org/name`."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text, re.ASCII):
        message = f"{text!r} is no repository of the Hub; write it as org/name"
        raise typer.BadParameter(message)
    return text


SOURCE: Final = (
    "A MoE checkpoint in safetensors: a directory, `org/name[@revision]` or a URL on the Hub, or a "
    "model's name."
)

_HUB: Final = "The Hub"
_WORK: Final = "Memory, speed, several machines"
_FILES: Final = "Files and proofs"
"""Panels of the help; what has none stands with the options that everybody needs."""

FAMILY: Final = typer.Option(
    "--family",
    help="Take the names of this family.",
    show_default="by model_type",
    autocompletion=completion.families,
)

PUSH: Final = typer.Option(
    "--push",
    parser=parse_repository,
    metavar="ORG/NAME",
    help="Publish to this model repository on the Hub, shard by shard while converting.",
    show_default="keep it here",
    rich_help_panel=_HUB,
)
PRIVATE: Final = typer.Option(
    "--private", help="Make the repository private.", rich_help_panel=_HUB
)
REVISION: Final = typer.Option(
    "--revision", help="Branch of the repository to publish on.", rich_help_panel=_HUB
)
CREATE_PR: Final = typer.Option(
    "--create-pr", help="Publish as a pull request.", rich_help_panel=_HUB
)

SHARED: Final[Mapping[str, ParameterInfo]] = {
    "source": typer.Argument(metavar="SRC", help=SOURCE),
    "keep_source": typer.Option(
        "--keep-source",
        help="Fetch a Hub repository whole, into its library's cache, first.",
        rich_help_panel=_HUB,
    ),
    "out": typer.Option("--out", help="Output directory.", show_default="./<name>-<layout>"),
    "tp": typer.Option(
        "--tp",
        min=1,
        help="Make the file for one tensor-parallel size, in the engine's own order.",
        show_default="one file for every size",
    ),
    "device": typer.Option(
        "--device",
        help="auto (a GPU where cores are few), cpu, cuda or cuda:N; the bytes are the same.",
        rich_help_panel=_WORK,
    ),
    "max_host_bytes": typer.Option(
        "--max-host-memory",
        parser=parse_size,
        metavar="SIZE",
        help="Bound on all buffers together.",
        show_default="1GiB",
        rich_help_panel=_WORK,
    ),
    "max_device_bytes": typer.Option(
        "--max-device-memory",
        parser=parse_size,
        metavar="SIZE",
        help="Bound on the buffers on a GPU.",
        show_default="1GiB",
        rich_help_panel=_WORK,
    ),
    "max_shard_bytes": typer.Option(
        "--max-shard-size",
        parser=parse_size,
        metavar="SIZE",
        help="Largest output file.",
        show_default="5GB",
        rich_help_panel=_FILES,
    ),
    "layers": typer.Option(
        "--layers",
        parser=parse_layers,
        metavar="A-B",
        help="Convert only these layers, for a trial; readers refuse the result unless asked.",
        show_default="all",
    ),
    "workers": typer.Option(
        "--workers",
        min=1,
        max=MOST_WORKERS,
        help="Threads that read, lay out and write.",
        show_default="half of the cores, 2 to 16",
        rich_help_panel=_WORK,
    ),
    "family": FAMILY,
    "share": typer.Option(
        "--shard-of",
        parser=_parse_share,
        metavar="I/N",
        help="Do the I-th of N shares of the work, from 1/N on; `moeconv seal` joins them.",
        show_default="all of it",
        rich_help_panel=_WORK,
    ),
    "push": PUSH,
    "private": PRIVATE,
    "revision": REVISION,
    "create_pr": CREATE_PR,
    "max_disk_bytes": typer.Option(
        "--max-disk",
        parser=parse_size,
        metavar="SIZE",
        help="With --push, remove shards that are on the Hub, so that those here stay below this.",
        show_default="keep them",
        rich_help_panel=_HUB,
    ),
    "dry_run": typer.Option("--dry-run", help="Show the plan and write nothing."),
    "sidecar": typer.Option(
        "--sidecar/--no-sidecar",
        help="Keep in restore/ what `moeconv restore` needs beside the converted tensors.",
        rich_help_panel=_FILES,
    ),
    "overwrite": typer.Option(
        "--overwrite",
        help="Replace an earlier moeconv directory at --out; an unfinished run of the same plan "
        "goes on.",
    ),
    "recheck": typer.Option(
        "--recheck",
        help="Read finished shards again; those with other bytes are done again.",
        rich_help_panel=_FILES,
    ),
    "hash_source": typer.Option(
        "--hash-source",
        help="Read each source file whole first, to keep its SHA-256 in the manifest.",
        rich_help_panel=_FILES,
    ),
    "as_json": typer.Option("--json", help="Print JSON lines to stdout, for machines."),
}
"""A row for each field of `Options` that has a flag of its own; in the order of the help."""


def _check_together(options: Options) -> None:
    """Refuse an option that would do nothing, or that another contradicts."""
    needless = {
        "--private": options.private,
        "--revision": options.revision != "main",
        "--create-pr": options.create_pr,
    }
    if options.push is None and any(needless.values()):
        said = next(name for name, is_said in needless.items() if is_said)
        message = f"{said} says how to publish; it needs --push ORG/NAME"
        if said == "--revision":
            message += " (for a revision of the source: ORG/NAME@REVISION)"
        raise typer.BadParameter(message)
    if options.keep_source and is_there(Path(options.source)):
        message = f"--keep-source is for a repository of the Hub; {options.source!r} is here"
        raise typer.BadParameter(message)
    if options.share and launched() != WHOLE:
        message = "RANK and WORLD_SIZE are set: unset them, or leave --shard-of out"
        raise typer.BadParameter(message)


def takes_options(run: Callable[Concatenate[Options, P], None]) -> Callable[..., None]:
    """Let a command take `Options` as one value: for a person each row of `SHARED` is a flag.

    The command's own parameters are keyword-only and stay flags beside them.
    """
    types = get_type_hints(Options)
    kept = {field.name: field for field in fields(Options) if field.name in SHARED}
    shared = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if name == "source" else kept[name].default,
            annotation=Annotated[types[name], row],
        )
        for name, row in SHARED.items()
    ]
    _, *own = inspect.signature(run, eval_str=True).parameters.values()

    @functools.wraps(run)
    def command(*args: P.args, **said: P.kwargs) -> None:
        chosen: dict[str, Any] = {name: said.pop(name) for name in SHARED}
        options = Options(**chosen)
        _check_together(options)
        run(options, *args, **said)

    signed: Any = command
    signed.__signature__ = inspect.Signature([*own, *shared])
    return command
