"""How long does a whole conversion take, beside `cp` of the same files on the same disk?"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moeconv import report
from moeconv.bench.checkpoint import KINDS, write_checkpoint
from moeconv.errors import OutputError
from moeconv.output.codec import read_manifest
from moeconv.output.manifest import RunEntry

if TYPE_CHECKING:
    from moeconv.bench.shapes import Shape
    from moeconv.kernels.through import Through


@dataclass(frozen=True, slots=True)
class WholeFigure:
    """One layout: the time of conversions and copies that took turns.

    Attributes
    ----------
    nbytes
        Of the source's weights, read once and written once by either.
    cold
        Each run found the source on the disk, not in the page cache.
    seconds, cp_seconds
        Of each run, start of the process and fsync of all files included.
    own_seconds
        Of each conversion, from its first look at the weights to the seal: without the start of
        Python and of a GPU.
    through_seconds
        Of each copy through the GPU, in a process that runs; none on the host.
    peak_rss_bytes, peak_device_bytes
        Of the conversions, the highest.
    """

    shape: str
    layout: str
    device: str
    kernels: str
    nbytes: int
    cold: bool
    seconds: tuple[float, ...]
    own_seconds: tuple[float, ...]
    cp_seconds: tuple[float, ...]
    through_seconds: tuple[float, ...]
    peak_rss_bytes: int
    peak_device_bytes: int

    @property
    def of_cp(self) -> float:
        """Time of a conversion over that of `cp`, medians."""
        return statistics.median(self.seconds) / statistics.median(self.cp_seconds)

    @property
    def of_through(self) -> float | None:
        """Speed of a conversion over that of a copy through the GPU, medians."""
        if not self.through_seconds:
            return None
        return statistics.median(self.through_seconds) / statistics.median(self.own_seconds)


@dataclass(frozen=True, slots=True)
class Trial:
    """What to measure: layout, sizes, device, how much, how often, and where.

    Attributes
    ----------
    cold
        Drop the source from the page cache before each run.
    """

    layout: str
    shape: Shape
    device: str
    size_bytes: int
    repeats: int
    folder: Path
    cold: bool = False


@dataclass(slots=True)
class _Turns:
    """What was measured so far."""

    runs: list[RunEntry]
    whole: list[float]
    own: list[float]
    cp: list[float]
    through: list[float]


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
    free, needed = shutil.disk_usage(trial.folder).free, 2.2 * trial.size_bytes
    if free < needed:
        room = f"{report.size(free)} free, but about {report.size(needed)} are needed"
        message = f"`{trial.folder}` has {room}"
        raise OutputError(message, hint="give a smaller `--size`, or a `--dir` on another disk")
    try:
        yield f"writing a checkpoint for {trial.layout}"
        source = work / "source"
        nbytes = write_checkpoint(source, KINDS[trial.layout], trial.shape, trial.size_bytes)
        _sync(source)
        turns = _Turns([], [], [], [], [])
        through = _through(trial.device)
        for number in range(trial.repeats):
            yield f"{trial.layout}: run {number + 1} of {trial.repeats}"
            _turn(trial, work, turns, through)
    except OSError as error:
        message = f"`{work}` cannot be written: {error.strerror}"
        raise OutputError(message, hint="give a `--dir` on another disk") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    yield WholeFigure(
        shape=trial.shape.name,
        layout=trial.layout,
        device=turns.runs[0].device,
        kernels=turns.runs[0].kernels,
        nbytes=nbytes,
        cold=trial.cold,
        seconds=tuple(turns.whole),
        own_seconds=tuple(turns.own),
        cp_seconds=tuple(turns.cp),
        through_seconds=tuple(turns.through),
        peak_rss_bytes=max(run.peak_rss_bytes for run in turns.runs),
        peak_device_bytes=max(run.peak_device_bytes for run in turns.runs),
    )


def _turn(trial: Trial, work: Path, turns: _Turns, through: Through | None) -> None:
    """Convert, copy, and copy through the GPU if there is one; leave only the source."""
    source, out = work / "source", work / "out"

    def seconds(run: Callable[[], object]) -> float:
        if trial.cold:
            _forget(source)
        began = time.perf_counter()
        run()
        taken = time.perf_counter() - began
        shutil.rmtree(out)
        return taken

    def convert() -> None:
        turns.own.append(_convert(trial, source, out))
        turns.runs.append(read_manifest(out).run)

    def copy() -> None:
        _copy(source, out)
        _sync(out)

    turns.whole.append(seconds(convert))
    turns.cp.append(seconds(copy))
    if through:
        files = sorted(source.glob("*.safetensors"))
        turns.through.append(seconds(lambda: through.copy(files, out)))


def _through(device: str) -> Through | None:
    """Return buffers for copies through a GPU; none on the host."""
    if device == "cpu":
        return None
    from moeconv.kernels.through import Through

    return Through(device)


def _convert(trial: Trial, source: Path, out: Path) -> float:
    """Run the real command; return the seconds that it says it took."""
    args = ("convert", str(source), "--layout", trial.layout, "--out", str(out), "--json")
    command = (sys.executable, "-m", "moeconv", *args, "--device", trial.device)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"a conversion failed with exit code {done.returncode}: {done.stderr.strip()}"
        raise OutputError(message)
    seconds: float = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return seconds


def _copy(source: Path, copy: Path) -> None:
    command = ("cp", "-r", "--reflink=never", source, copy)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"`cp` failed with exit code {done.returncode}: {done.stderr.strip()}"
        raise OutputError(message)


def _sync(folder: Path) -> None:
    """Make the files of a folder durable, as a conversion does with its own."""
    for fd in _opened(folder):
        os.fsync(fd)


def _forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache; they are durable, so that they can go."""
    for fd in _opened(folder):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _opened(folder: Path) -> Generator[int, None, None]:
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)
