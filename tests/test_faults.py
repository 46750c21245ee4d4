"""Die, or have the disk fail, at every read, write, fsync, rename and removal of a conversion.

The same command then makes the bytes of an uninterrupted run, and until it has no reader takes the
directory. `slow` tries every point; a plain run tries a few.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from moeconv import layouts
from moeconv.errors import SourceError
from moeconv.serving import open_converted
from tests import crashing, disks, forked, runs
from tests.crashing import SAID
from tests.fp4.models import Model
from tests.sources import Tiny, write_tiny

VLLM, SGLANG = ("--engine", "vllm"), ("--engine", "sglang")
LAYOUTS = {
    "trtllm-bf16": ("bf16", "trtllm"),
    "marlin-nvfp4": ("modelopt", "marlin-fp4", *VLLM),
    "marlin-nvfp4-sglang": ("ct", "marlin-fp4", *SGLANG),
    "marlin-mxfp4": ("deepseek", "marlin-fp4", *VLLM),
    "marlin-mxfp4-ct": ("ct-mxfp4", "marlin-fp4", *VLLM),
    "marlin-mxfp4-gptoss": ("gptoss", "marlin-fp4", *VLLM),
    "marlin-mxfp4-gptoss-sglang": ("gptoss", "marlin-fp4", *SGLANG),
}


SHOWN = {
    "full": "full",
    "quota": "over quota",
    "failing": "failing, with what was not fsynced lost,",
    "read-only": "read-only",
    "unmounted": "unmounted",
    "disconnected": "without its server",
}


def source_of(kind: str, root: Path) -> Path:
    if kind == "bf16":
        tiny = Tiny(experts=2, layers=1, shards=1, hidden=64, intermediate=64)
        return write_tiny(root, tiny)
    return Model(kind, experts=2, layers=1, hidden=128, intermediate=128).write(root)


def crash(
    layout: str,
    folder: Path,
    *,
    points: int,
    processes: int = 1,
    workers: int = 1,
    trouble: str = "death",
) -> dict[str, int]:
    """Have trouble at some points of a conversion (0: all), and return how many there are."""
    command = conversion(layout, folder)
    return drive(folder, (points, processes, trouble), *command, "--workers", workers)


def crash_restoring(folder: Path, *, points: int, trouble: str) -> dict[str, int]:
    """Have trouble at some points of restoring a conversion (0: all)."""
    runs.invoke(*conversion("marlin-nvfp4", folder), "--out", folder / "out")
    restoring = ("restore", folder / "out", "--device", "cpu")
    return drive(folder, (points, 1, trouble), *restoring)


def conversion(layout: str, folder: Path) -> tuple[str | Path, ...]:
    """Write a checkpoint, and return the command that converts it to several shards."""
    kind, *args = LAYOUTS[layout]
    size = "40kB" if kind != "bf16" else "20kB"
    source = source_of(kind, folder / "source")
    return (*args, source, "--max-shard-size", size, "--device", "cpu")


def drive(
    folder: Path, trouble: tuple[int, int, str], *command: str | Path | int
) -> dict[str, int]:
    (folder / "runs").mkdir()
    words = (folder / "runs", *trouble, *command)
    done = forked.Running([*map(str, words)], None, crashing.main).ended(3600)
    assert done.returncode == 0, done.stderr
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def test_every_layout_is_put_to_the_test():
    assert LAYOUTS.keys() == {layout.id for layout in layouts.LAYOUTS}


@pytest.mark.parametrize("layout", ["trtllm-bf16", "marlin-nvfp4", "marlin-mxfp4-gptoss"])
def test_death_at_some_points(tmp_path, layout):
    assert crash(layout, tmp_path, points=5)["points"] > 100


def test_death_beside_another_process(tmp_path):
    assert crash("trtllm-bf16", tmp_path, points=4, processes=2, workers=2)["tried"] >= 4


@pytest.mark.skipif(not disks.can_be_made(), reason="a disk of its own needs root and mkfs.ext4")
def test_a_disk_that_fails_at_some_points(tmp_path):
    troubles = ",".join(SAID)
    assert crash("marlin-nvfp4", tmp_path, points=6, trouble=troubles)["tried"] >= len(SAID)


@pytest.mark.slow
@pytest.mark.skipif(not disks.can_be_made(), reason="a disk of its own needs root and mkfs.ext4")
@pytest.mark.parametrize("trouble", SAID)
def test_a_disk_that_fails_at_every_point(tmp_path, trouble, record):
    tried = crash("marlin-nvfp4", tmp_path, points=0, trouble=trouble)["tried"]
    kind = "injected" if trouble == "quota" else "a real disk"
    result = "one line of what, where and why; mended, the bytes of an undisturbed run"
    record(f"disk {SHOWN[trouble]} from every call on ({kind})", tried, result)


@pytest.mark.skipif(not disks.can_be_made(), reason="a disk of its own needs root and mkfs.ext4")
def test_a_disk_that_fails_while_it_is_restored_to(tmp_path):
    assert crash_restoring(tmp_path, points=2, trouble="full,disconnected")["tried"] >= 2


@pytest.mark.slow
def test_death_at_every_point_of_restoring(tmp_path, record):
    tried = crash_restoring(tmp_path, points=0, trouble="death")["tried"]
    record("restoring: death at every call", tried, "the bytes of an undisturbed run")


@pytest.mark.slow
@pytest.mark.skipif(not disks.can_be_made(), reason="a disk of its own needs root and mkfs.ext4")
def test_a_disk_that_fails_at_every_point_of_restoring(tmp_path, record):
    tried = crash_restoring(tmp_path, points=0, trouble=",".join(SAID))["tried"]
    what = "restoring: a disk in one of these six ways from every call on, by turns"
    record(what, tried, "one line of what, where and why; mended, the bytes of an undisturbed run")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_death_at_every_point(tmp_path, layout, record):
    counts = crash(layout, tmp_path, points=0)
    assert counts["tried"] == counts["points"]
    record(f"death at every call, {layout}", counts["tried"], "the bytes of an undisturbed run")


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "processes"), [(2, 1), (1, 2), (2, 2)])
def test_death_at_every_point_beside_others(tmp_path, workers, processes, record):
    counts = crash("marlin-nvfp4", tmp_path, points=0, workers=workers, processes=processes)
    what = f"death at every call, {workers} workers, {processes} processes"
    record(what, counts["tried"], "the bytes of an undisturbed run")


@pytest.mark.slow
def test_sigkill_at_random_times(tmp_path, record):
    """A larger conversion, killed 100 times at a random moment of its work, and resumed."""
    chance, times = random.Random(28), 100
    source = write_tiny(
        tmp_path / "source", Tiny(experts=16, layers=6, hidden=512, intermediate=512)
    )
    args = ("trtllm", source, "--max-shard-size", "3MB", "--device", "cpu")
    process, began_s = begin(*args, "--out", tmp_path / "whole")
    assert process.wait() == 0
    took_s = time.monotonic() - began_s
    expected = runs.tree(tmp_path / "whole")
    killed = finished = 0
    while killed < times:
        out = tmp_path / f"out{killed + finished}"
        process, _ = begin(*args, "--out", out)
        time.sleep(chance.uniform(0, took_s))
        process.send_signal(signal.SIGKILL)
        process.wait()
        is_whole = (out / "moeconv.json").exists()
        finished, killed = finished + is_whole, killed + (not is_whole)
        if not is_whole:
            with pytest.raises(SourceError):
                open_converted(out)
        again = runs.moeconv(*args, "--out", out)
        assert again.returncode == 0, again.stderr
        assert runs.tree(out) == expected, out
        subprocess.run(["rm", "-r", out], check=True)
    what = "SIGKILL at a random moment of a larger conversion, before it was whole"
    record(what, killed, f"the bytes of an undisturbed run, as of {finished} that were whole")


def begin(*args: str | Path) -> tuple[subprocess.Popen[bytes], float]:
    """Start the command, and return when it has begun to write, with the time."""
    command = [*runs.COMMAND, *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (Path(args[-1]) / ".moeconv").exists():
        assert process.poll() is None, "it ended before it began"
        time.sleep(0.005)
    return process, time.monotonic()
