"""Drive conversions: in this process step by step, or as the real command."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from moeconv.checkpoint.types import Checkpoint
from moeconv.cli import app, main
from moeconv.conversion.budget import Limits
from moeconv.conversion.convert import convert
from moeconv.conversion.pipeline import Moved
from moeconv.kernels.cpu import CpuKernels
from moeconv.layouts import TRTLLM_BF16
from moeconv.layouts.fingerprint import fingerprint
from moeconv.output.directory import OutputDirectory
from moeconv.output.manifest import Manifest
from moeconv.output.records import ShardRecord
from moeconv.planning.plan import Plan, Target, make_plan
from moeconv.planning.sidecar import settle
from moeconv.serving import open_converted
from moeconv.sourcing import open_source
from tests import driven as faults
from tests import forked

COMMAND = (sys.executable, "-m", "moeconv")


@dataclass(frozen=True)
class Wanted:
    """What decides the bytes of a conversion."""

    tp: int | None = None
    max_shard_bytes: int = 10**9
    layers: tuple[int, int] | None = None
    family: str | None = None


DEFAULT = Wanted()


def plan(source: Path, wanted: Wanted = DEFAULT) -> tuple[Plan, Checkpoint]:
    """Open a checkpoint and plan its conversion to `trtllm-bf16`, which surveys nothing."""
    checkpoint = open_source(str(source))
    prints = fingerprint(TRTLLM_BF16, CpuKernels())
    target = Target(TRTLLM_BF16, prints, wanted.tp, wanted.max_shard_bytes, wanted.layers)
    return settle(make_plan(checkpoint, target, wanted.family), checkpoint, {}), checkpoint


def events(
    source: Path, out: Path, wanted: Wanted = DEFAULT, *, overwrite: bool = False, workers: int = 1
) -> Iterator[Moved | ShardRecord | Manifest]:
    """Convert, event by event."""
    decided, checkpoint = plan(source, wanted)
    directory = OutputDirectory(out, decided.id, decided.identity, overwrite=overwrite)
    if not directory.finished:
        yield from convert(decided, checkpoint, directory, CpuKernels(), Limits(workers, 1 << 30))


def run(source: Path, out: Path, wanted: Wanted = DEFAULT, *, overwrite: bool = False) -> Path:
    """Convert to the end."""
    for _ in events(source, out, wanted, overwrite=overwrite):
        pass
    return out


def tree(root: Path) -> dict[str, Any]:
    """Every file of a directory by path; of the manifest all but what tells two runs apart."""
    files: dict[str, Any] = {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }
    if "moeconv.json" in files:
        files["moeconv.json"] = {
            **json.loads(files["moeconv.json"]),
            "run": None,
            "run_digest": None,
        }
    return files


def shards(root: Path) -> dict[str, bytes]:
    """Every shard under its final name."""
    return {
        name: data
        for name, data in tree(root).items()
        if name.endswith(".safetensors") and not name.startswith(".moeconv")
    }


def rank_bytes(
    root: Path, *, tp: int = 1, rank: int = 0, ep: int = 1, ep_rank: int = 0, partial: bool = False
) -> dict[tuple[int, str], bytes]:
    """Read all that a rank reads, by layer and parameter."""
    read = {}
    with open_converted(root, allow_partial=partial) as converted:
        view = converted.rank(tp_size=tp, tp_rank=rank, ep_size=ep, ep_rank=ep_rank)
        for tensor in view.tensors():
            out = np.full(tensor.nbytes, 0xA5, np.uint8)  # a byte that is not written shows
            view.read_into(tensor, out, check=True)
            read[tensor.layer, tensor.param] = out.tobytes()
    return read


def moeconv(
    *args: str | Path, cwd: Path | None = None, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run the real command, in a process of its own that has imported most of what it needs."""
    return forked.Running([str(arg) for arg in args], cwd, main).ended(timeout_s)


def on_a_terminal(*args: str | Path) -> str:
    """Run the real command with a terminal for its messages; return what it showed there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *map(str, args)],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal, on Linux
        while piece := os.read(ours, 1 << 16):
            shown += piece
    os.close(ours)
    assert process.wait(timeout=60) == 0, shown
    return shown.decode()


def invoke(*args: str | Path) -> str:
    """Run the command in this process, where starting one each time would cost too much."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def start(fault: str, amount: float, *args: str | Path) -> forked.Running:
    """Start the real command with a fault, as `driven.py` has them."""
    return forked.Running([str(arg) for arg in args], None, partial(faults.main, fault, amount))


def driven(fault: str, amount: float, *args: str | Path) -> tuple[int, str, str]:
    """Run the real command with a fault; return exit status, output and messages."""
    done = start(fault, amount, *args).ended()
    return done.returncode, done.stdout, done.stderr


def json_lines(text: str) -> list[dict[str, Any]]:
    """Decode JSON lines."""
    return [json.loads(line) for line in text.splitlines()]
