"""Measure `verify --read-data` beside plain reading with the same digests, in turns.

    python docs/figures/verifying.py OUT FIGURES.json

Plain reading takes SHA-256 and XXH3-128 of every file, as many files at a time as `verify` does.
CPU seconds count where other work shares the cores. The files are read once before.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from moeconv.kernels.cpu import CpuKernels
from moeconv.verification.digests import Subset
from moeconv.verification.verify import verify

TURNS = 5
_PIECE = 4 << 20


def read(path: Path) -> None:
    """Take both digests of a file."""
    sha256, xxh3, buffer = hashlib.sha256(), xxhash.xxh3_128(), bytearray(_PIECE)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            chunk = memoryview(buffer)[:count]
            sha256.update(chunk)
            xxh3.update(chunk)


def timed(do: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds."""
    before, started_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    do()
    wall_s, after = time.perf_counter() - started_s, resource.getrusage(resource.RUSAGE_SELF)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("figures", type=Path)
    chosen = parser.parse_args()
    files = [path for path in chosen.out.rglob("*") if path.is_file()]
    width = min(8, os.cpu_count() or 1)

    def plainly() -> None:
        with ThreadPoolExecutor(width) as pool:
            list(pool.map(read, files))

    def verified() -> None:
        for _ in verify(chosen.out, CpuKernels(), read_data=Subset()):
            pass

    plainly()
    turns = [(timed(plainly), timed(verified)) for _ in range(TURNS)]
    plain, ours = zip(*turns, strict=True)
    shown = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": "python docs/figures/verifying.py OUT FIGURES.json",
        "bytes": sum(path.stat().st_size for path in files),
        "cores": os.cpu_count(),
        "turns": TURNS,
        "plain": _medians(plain),
        "verify": _medians(ours),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    chosen.figures.write_text(json.dumps(shown, indent=1) + "\n")
    print(json.dumps(shown, indent=1))


def _medians(turns: tuple[tuple[float, float], ...]) -> dict[str, float]:
    walls, cpus = zip(*turns, strict=True)
    return {
        "seconds": round(statistics.median(walls), 2),
        "cpu_seconds": round(statistics.median(cpus), 2),
    }


if __name__ == "__main__":
    main()
