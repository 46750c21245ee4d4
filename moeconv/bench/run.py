"""What does `bench` show? Figures with their ceilings, for people, machines and as a picture."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeconv import report
from moeconv.bench.checkpoint import KINDS
from moeconv.bench.plot import Bar, bars
from moeconv.bench.shapes import Shape
from moeconv.bench.whole import Trial, WholeFigure, measure_whole
from moeconv.errors import OutputError, UnsupportedError
from moeconv.kernels import pick
from moeconv.layouts import named_layout

if TYPE_CHECKING:
    from moeconv.bench.moves import KernelFigure
    from moeconv.layouts.layout import Layout
    from moeconv.layouts.verbs import Kernels

LAYOUTS: Final = ("trtllm-bf16", "marlin-nvfp4", "marlin-mxfp4")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure.

    Attributes
    ----------
    kernels, whole
        Measure kernels alone, and whole conversions beside `cp`.
    size_bytes
        Of the checkpoint that is made for a whole conversion, about.
    cold
        A whole conversion finds its source on the disk, not in the page cache.
    """

    layouts: tuple[str, ...]
    shapes: tuple[Shape, ...]
    device: str
    kernels: bool
    whole: bool
    size_bytes: int
    repeats: int
    folder: Path
    cold: bool = False


def run_bench(wanted: Wanted, *, plot: Path | None, as_json: bool) -> None:
    """Measure, and show each figure as it is there."""
    chosen = [named_layout(name) for name in wanted.layouts]
    kernels = pick(wanted.device)
    if plot:
        _check_writable(plot)
    with report.waiting() as say:
        moves = list(_moves(wanted, kernels, chosen, say)) if wanted.kernels else []
        wholes = list(_wholes(wanted, kernels.device, say)) if wanted.whole else []
    if not moves and not wholes:
        message = f"nothing to measure: whole conversions are those to {', '.join(KINDS)}"
        raise UnsupportedError(message)
    if as_json:
        report.emit(
            {
                "event": "bench",
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": _machine(kernels.device),
                "kernels": [{**asdict(one), "of_copy": round(one.of_copy, 4)} for one in moves],
                "whole": [_whole(one) for one in wholes],
            }
        )
    else:
        _show(moves, wholes)
    if plot:
        _write(plot, _picture(moves, wholes))


def _check_writable(plot: Path) -> None:
    """Refuse a picture that could not be written, before minutes of measuring."""
    if plot.is_dir():
        raise OutputError(f"cannot write `{plot}`: it is a directory")
    if not os.access(plot if plot.exists() else plot.parent, os.W_OK):
        why = "it may not be written" if plot.parent.is_dir() else f"there is no `{plot.parent}`"
        raise OutputError(f"cannot write `{plot}`: {why}")


def _write(plot: Path, picture: str) -> None:
    try:
        plot.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write `{plot}`: {error.strerror}") from error


def _moves(
    wanted: Wanted, kernels: Kernels, chosen: list[Layout], say: report.Say
) -> Iterator[KernelFigure]:
    from moeconv.bench.moves import measure_kernels

    for shape in wanted.shapes:
        for layout in chosen:
            say(f"{layout.id}, {shape.name}")
            yield from measure_kernels(kernels, layout, shape)


def _wholes(wanted: Wanted, device: str, say: report.Say) -> Iterator[WholeFigure]:
    for shape in wanted.shapes:
        for name in wanted.layouts:
            if name not in KINDS:
                continue
            sizes = wanted.size_bytes, wanted.repeats
            trial = Trial(name, shape, device, *sizes, wanted.folder, wanted.cold)
            for event in measure_whole(trial):
                if isinstance(event, str):
                    say(event)
                else:
                    yield event


def _whole(figure: WholeFigure) -> dict[str, object]:
    """Return a figure with its ratios."""
    ratios = {"of_cp": figure.of_cp, "of_through": figure.of_through}
    rounded = {name: ratio and round(ratio, 4) for name, ratio in ratios.items()}
    return {**asdict(figure), **rounded}


def _show(moves: list[KernelFigure], wholes: list[WholeFigure]) -> None:
    rate = report.rate
    if moves:
        report.grid(
            "kernels: bytes read and written",
            ("layout, shape", "what", "kernels", "rate", "a copy", "of it"),
            [
                (
                    *(_of(one), one.what, one.kernels),
                    *(rate(one.nbytes / one.seconds), rate(one.nbytes / one.copy_seconds)),
                    f"{one.of_copy:.0%}",
                )
                for one in moves
            ],
        )
    if wholes:
        report.grid(
            "whole conversions: bytes of the source",
            ("layout, shape\nkernels", "size", "rate", "cp -r", "of its\ntime", "memory"),
            [
                (
                    *(f"{_of(one)}\n{one.kernels}", report.size(one.nbytes)),
                    *(rate(one.nbytes / min(one.seconds)), rate(one.nbytes / min(one.cp_seconds))),
                    f"{one.of_cp:.2f}",
                    report.size(one.peak_rss_bytes),
                )
                for one in wholes
            ],
        )
    _show_through([one for one in wholes if one.through_seconds])


def _of(figure: KernelFigure | WholeFigure) -> str:
    """Return the layout and the shape, under each other: a terminal has 80 columns."""
    return f"{figure.layout}\n{figure.shape}"


def _show_through(wholes: list[WholeFigure]) -> None:
    """Show conversions on a GPU beside copies through it, both without what starts a process."""
    if not wholes:
        return
    rate = report.rate
    report.grid(
        "on the GPU, without the start of a process",
        ("layout, shape", "rate", "plain copies", "of them", "memory there"),
        [
            (
                _of(one),
                rate(one.nbytes / min(one.own_seconds)),
                rate(one.nbytes / min(one.through_seconds)),
                f"{one.of_through:.0%}",
                report.size(one.peak_device_bytes),
            )
            for one in wholes
        ],
    )


def _picture(moves: list[KernelFigure], wholes: list[WholeFigure]) -> str:
    if moves:
        rows = [
            Bar(
                f"{one.layout}, {one.shape}, {one.what}",
                one.of_copy,
                f"{one.of_copy:.0%} ({report.rate(one.nbytes / one.seconds)})",
            )
            for one in moves
        ]
        return bars("Kernels against a copy of the same bytes", "a copy", rows)
    rows = [Bar(f"{one.layout}, {one.shape}", one.of_cp, f"{one.of_cp:.2f}") for one in wholes]
    return bars("Time of a conversion over that of cp", "cp -r", rows)


def _machine(device: str) -> dict[str, str | int]:
    """Return what the figures depend on."""
    found: dict[str, str | int] = {
        "cpus": len(os.sched_getaffinity(0)),
        "load": str(round(os.getloadavg()[0], 1)),
        "python": platform.python_version(),
        "moeconv": metadata.version("moeconv"),
        "torch": metadata.version("torch"),
        "device": device,
    }
    if device != "cpu":
        import torch

        found["gpu"] = torch.cuda.get_device_name(device)
    return found
