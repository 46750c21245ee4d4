"""How long does a whole conversion take, beside `cp` of the same files on the same disk?"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeconv.bench.checkpoint import write_checkpoint
from moeconv.errors import OutputError
from moeconv.output.manifest import RunEntry, read_manifest

if TYPE_CHECKING:
    from moeconv.bench.shapes import Shape

SCHEMES: Final = {"trtllm-bf16": "bf16", "marlin-nvfp4": "modelopt-nvfp4"}
"""Layouts that whole conversions are measured for, and what they are made of."""


@dataclass(frozen=True, slots=True)
class WholeFigure:
    """One layout: the time of conversions and copies that took turns.

    Attributes
    ----------
    nbytes
        Of the source's weights, read once and written once by either.
    seconds, cp_seconds
        Of each run, start of the process and fsync of all files included.
    peak_rss_bytes, peak_device_bytes
        Of the conversions, the highest.
    """

    shape: str
    layout: str
    device: str
    kernels: str
    nbytes: int
    seconds: tuple[float, ...]
    cp_seconds: tuple[float, ...]
    peak_rss_bytes: int
    peak_device_bytes: int

    @property
    def of_cp(self) -> float:
        """Time of a conversion over that of `cp`, medians."""
        return statistics.median(self.seconds) / statistics.median(self.cp_seconds)


@dataclass(frozen=True, slots=True)
class Trial:
    """What to measure: layout, sizes, device, how much, how often, and where."""

    layout: str
    shape: Shape
    device: str
    size_bytes: int
    repeats: int
    folder: Path


def measure_whole(trial: Trial) -> Generator[str | WholeFigure, None, None]:
    """Convert and copy in turns; yields what is being done, then the figure.

    Everything that is written lies in a folder of its own below `trial.folder`, which is removed
    whatever happens.

    Raises
    ------
    OutputError
        The disk is full, or a conversion failed.
    """
    work = trial.folder / f"moeconv-bench-{os.getpid()}"
    source, out, copy = work / "source", work / "out", work / "copy"
    free, needed = shutil.disk_usage(trial.folder).free, 2.2 * trial.size_bytes
    if free < needed:
        message = f"`{trial.folder}` has {free} bytes free, but about {needed:.0f} are needed"
        raise OutputError(message, hint="give a smaller `--size`, or a `--dir` on another disk")
    try:
        yield f"writing a checkpoint for {trial.layout}"
        nbytes = write_checkpoint(source, SCHEMES[trial.layout], trial.shape, trial.size_bytes)
        _sync(source)
        ours, theirs, runs = [], [], []
        for number in range(trial.repeats):
            yield f"{trial.layout}: run {number + 1} of {trial.repeats}"
            began = time.perf_counter()
            runs.append(_convert(trial, source, out))
            ours.append(time.perf_counter() - began)
            shutil.rmtree(out)
            began = time.perf_counter()
            _copy(source, copy)
            _sync(copy)
            theirs.append(time.perf_counter() - began)
            shutil.rmtree(copy)
    except OSError as error:
        message = f"`{work}` cannot be written: {error.strerror}"
        raise OutputError(message, hint="give a `--dir` on another disk") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    yield WholeFigure(
        shape=trial.shape.name,
        layout=trial.layout,
        device=runs[0].device,
        kernels=runs[0].kernels,
        nbytes=nbytes,
        seconds=tuple(ours),
        cp_seconds=tuple(theirs),
        peak_rss_bytes=max(run.peak_rss_bytes for run in runs),
        peak_device_bytes=max(run.peak_device_bytes for run in runs),
    )


def _convert(trial: Trial, source: Path, out: Path) -> RunEntry:
    """Run the real command; return what it notes of its run."""
    args = ("convert", str(source), "--layout", trial.layout, "--out", str(out))
    command = (sys.executable, "-m", "moeconv", *args, "--device", trial.device)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"a conversion failed with exit code {done.returncode}: {done.stderr.strip()}"
        raise OutputError(message)
    return read_manifest(out).run


def _copy(source: Path, copy: Path) -> None:
    command = ("cp", "-r", "--reflink=never", source, copy)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"`cp` failed with exit code {done.returncode}: {done.stderr.strip()}"
        raise OutputError(message)


def _sync(folder: Path) -> None:
    """Make the files of a folder durable, as a conversion does with its own."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
