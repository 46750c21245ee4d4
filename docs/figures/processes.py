"""Measure a conversion that several processes of one machine share.

    python docs/figures/processes.py CHECKPOINT WORK FIGURES.json --verb trtllm --cases cpu=1 cpu=4

A case is a device and so many processes: `cuda=2` gives each a GPU, `cuda:0=2` has both on one.
They are started at once, with the names set that torchrun sets.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from pipeline import machine


def run(source: Path, out: Path, verb: str, device: str, count: int) -> dict[str, object]:
    """Convert once; return the time of all, and what the first process says of its own."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "moeconv", verb, str(source), "--out", str(out), "--json"]
    began = time.perf_counter()
    ranks = [
        subprocess.Popen(
            [*command, "--device", device],
            env={
                **os.environ,
                **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
                **{name: str(count) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    told = [rank.communicate()[0] for rank in ranks]
    wall_s = round(time.perf_counter() - began, 2)
    if any(rank.returncode for rank in ranks):
        sys.exit("a process failed")
    done = json.loads(told[0].splitlines()[-1])
    shown = {name: done[name] for name in ("seconds", "peak_rss_bytes", "peak_device_bytes")}
    return {"device": device, "processes": count, "wall_s": wall_s, **shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--verb", default="trtllm")
    parser.add_argument("--cases", nargs="+", default=["cpu=1", "cpu=2", "cpu=4"])
    options = parser.parse_args()
    rows = []
    for case in options.cases:
        device, _, count = case.rpartition("=")
        rows.append(run(options.source, options.work / "out", options.verb, device, int(count)))
        print(rows[-1], flush=True)
    shutil.rmtree(options.work / "out")
    figures = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "rows": rows}
    options.figures.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
