"""What does `bench` show? Figures with their ceilings, for people, machines and as a picture."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

from moeconv import report
from moeconv.bench.moves import KernelFigure, measure_kernels
from moeconv.bench.plot import Bar, bars
from moeconv.bench.shapes import Shape
from moeconv.bench.whole import SCHEMES, Trial, WholeFigure, measure_whole
from moeconv.errors import UnsupportedError
from moeconv.kernels import pick
from moeconv.layouts import named_layout

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
    """

    layouts: tuple[str, ...]
    shapes: tuple[Shape, ...]
    device: str
    kernels: bool
    whole: bool
    size_bytes: int
    repeats: int
    folder: Path


def run_bench(wanted: Wanted, *, plot: Path | None, as_json: bool) -> None:
    """Measure, and show each figure as it is there."""
    chosen = [named_layout(name) for name in wanted.layouts]
    kernels = pick(wanted.device)
    with report.waiting() as say:
        moves: list[KernelFigure] = []
        for shape in wanted.shapes if wanted.kernels else ():
            for layout in chosen:
                say(f"{layout.id}, {shape.name}")
                moves += measure_kernels(kernels, layout, shape)
        wholes = list(_wholes(wanted, say)) if wanted.whole else []
    if not moves and not wholes:
        message = f"nothing to measure: whole conversions are those to {' and '.join(SCHEMES)}"
        raise UnsupportedError(message)
    if plot:
        plot.write_text(_picture(moves, wholes), encoding="utf-8")
    if as_json:
        report.emit(
            {
                "event": "bench",
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": _machine(kernels.device),
                "kernels": [{**asdict(one), "of_copy": round(one.of_copy, 4)} for one in moves],
                "whole": [{**asdict(one), "of_cp": round(one.of_cp, 4)} for one in wholes],
            }
        )
        return
    _show(moves, wholes)


def _wholes(wanted: Wanted, say: report.Say) -> Iterator[WholeFigure]:
    for name in wanted.layouts:
        if name not in SCHEMES:
            continue
        trial = Trial(
            name, wanted.shapes[0], wanted.device, wanted.size_bytes, wanted.repeats, wanted.folder
        )
        for event in measure_whole(trial):
            if isinstance(event, str):
                say(event)
            else:
                yield event


def _show(moves: list[KernelFigure], wholes: list[WholeFigure]) -> None:
    rate = report.rate
    if moves:
        report.grid(
            "kernels: bytes read and written",
            ("layout", "shape", "what", "kernels", "rate", "a copy", "of it"),
            [
                (
                    *(one.layout, one.shape, one.what, one.kernels),
                    *(rate(one.nbytes / one.seconds), rate(one.nbytes / one.copy_seconds)),
                    f"{one.of_copy:.0%}",
                )
                for one in moves
            ],
        )
    if wholes:
        report.grid(
            "whole conversions: bytes of the source",
            ("layout", "size", "kernels", "rate", "cp -r", "time of cp's", "memory", "on a GPU"),
            [
                (
                    *(one.layout, report.size(one.nbytes), one.kernels),
                    *(rate(one.nbytes / min(one.seconds)), rate(one.nbytes / min(one.cp_seconds))),
                    f"{one.of_cp:.2f}",
                    report.size(one.peak_rss_bytes),
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
    import os

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
