"""Whatever stops a run, nothing half-done has a final name, and the same command ends it right."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moeconv.conversion.budget import Limits
from moeconv.conversion.convert import convert
from moeconv.errors import OutputError, SourceError
from moeconv.kernels.cpu import CpuKernels
from moeconv.output.directory import OutputDirectory
from tests import runs
from tests.runs import Wanted

SMALL = {"experts": 2, "layers": 1, "shards": 1, "hidden": 64, "intermediate": 64}
PIECES = Wanted(max_shard_bytes=30_000)


class Crash(Exception):  # noqa: N818  (no error of the program's)
    """The process is gone."""


def faulty(monkeypatch: pytest.MonkeyPatch, fail: Callable[[int], None]) -> dict[str, int]:
    """Call `fail` with a running number before each write, fsync and rename."""
    seen = {"calls": 0}

    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any) -> Any:
            seen["calls"] += 1
            fail(seen["calls"] - 1)
            return call(*args)

        return inner

    for name in ("pwrite", "fsync", "replace"):
        monkeypatch.setattr(os, name, before(getattr(os, name)))
    return seen


@pytest.fixture
def tiny(make_checkpoint) -> Path:
    made: Path = make_checkpoint(**SMALL)
    return made


@pytest.fixture
def expected(tiny, tmp_path) -> Path:
    """What an uninterrupted run makes of `tiny`."""
    return runs.run(tiny, tmp_path / "expected", PIECES)


def nothing_is_half_done(out: Path, expected: Path) -> bool:
    whole = runs.shards(expected)
    is_whole = all(whole[name] == data for name, data in runs.shards(out).items())
    return is_whole and (
        not (out / "moeconv.json").exists() or runs.shards(out).keys() == whole.keys()
    )


@pytest.mark.parametrize("kind", ["crash", "full"])
def test_every_write_fsync_and_rename(tiny, expected, tmp_path, monkeypatch, kind):
    with monkeypatch.context() as patch:
        calls = faulty(patch, lambda _: None)
        runs.run(tiny, tmp_path / "counted", PIECES)
    assert calls["calls"] > 40
    for point in range(calls["calls"]):
        out = tmp_path / f"out{point}"

        def fail(number: int, point: int = point) -> None:
            if number == point:
                raise Crash if kind == "crash" else OSError(errno.ENOSPC, "No space left")

        with monkeypatch.context() as patch:
            faulty(patch, fail)
            with pytest.raises(Crash if kind == "crash" else OutputError):
                runs.run(tiny, out, PIECES)
        assert nothing_is_half_done(out, expected), point
        runs.run(tiny, out, PIECES)
        assert runs.tree(out) == runs.tree(expected), point


@pytest.mark.parametrize("point", range(0, 40, 4))
def test_a_fault_in_one_of_several_shards(tiny, expected, tmp_path, monkeypatch, point):
    out = tmp_path / "out"

    def fail(number: int) -> None:
        if number == point:
            raise OSError(errno.ENOSPC, "No space left")

    with monkeypatch.context() as patch:
        faulty(patch, fail)
        with pytest.raises(OutputError):
            list(runs.events(tiny, out, PIECES, workers=6))
    assert nothing_is_half_done(out, expected)
    assert not list((out / ".moeconv/tmp").glob("*.safetensors"))
    list(runs.events(tiny, out, PIECES, workers=6))
    assert runs.tree(out) == runs.tree(expected)


def test_killed_at_random_points(tiny, expected, tmp_path):
    """CASES 28: five points; the process does not get to clean up."""
    args = ("trtllm", tiny, "--max-shard-size", PIECES.max_shard_bytes, "--out")
    code, out, err = runs.driven("count", 0, *map(str, args), tmp_path / "counted")
    assert code == 0, err
    calls = int(out.split()[-1])
    for point in random.Random(28).sample(range(calls), 5):
        target = tmp_path / f"killed{point}"
        code, _, err = runs.driven("kill", point, *map(str, args), target)
        assert code == -signal.SIGKILL, err
        assert nothing_is_half_done(target, expected), point
        again = runs.moeconv(*map(str, args), target)
        assert again.returncode == 0, again.stderr
        assert runs.tree(target) == runs.tree(expected), point


def test_killed_between_seal_and_tidying(tiny, expected, tmp_path):
    """The very last step: the manifest is there, the work folder too."""
    out = runs.run(tiny, tmp_path / "out", PIECES)
    (out / ".moeconv" / "locks").mkdir(parents=True)
    (out / ".moeconv" / "locks" / "seal").touch()
    again = runs.moeconv("trtllm", tiny, "--out", out, "--max-shard-size", "30000")
    assert again.returncode == 0, again.stderr
    assert runs.tree(out) == runs.tree(expected)


def test_what_is_recorded_is_not_done_again(tiny, tmp_path):
    out = tmp_path / "out"
    done = list(first_shards(tiny, out, 2))
    inodes = {name: (out / name).stat().st_ino for name in runs.shards(out)}
    assert len(inodes) == len(done) == 2
    runs.run(tiny, out, PIECES)
    assert {name: (out / name).stat().st_ino for name in inodes} == inodes


@pytest.mark.parametrize("damage", ["cut", "gone", "bit"])
def test_a_damaged_shard_is_done_again(tiny, expected, tmp_path, damage):
    """Size always; a bit with `--recheck`."""
    out = tmp_path / "out"
    first, _ = (out / record.file for record in first_shards(tiny, out, 2))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.unlink() if damage == "gone" else first.write_bytes(
        data[: -1 if damage == "cut" else None]
    )
    args = ("trtllm", tiny, "--out", out, "--max-shard-size", "30000", "--device", "cpu")
    again = runs.moeconv(*args, *(["--recheck"] if damage == "bit" else []))
    assert again.returncode == 0, again.stderr
    assert ("is damaged, and is done again" in again.stderr) == (damage == "bit")
    assert runs.tree(out) == runs.tree(expected)


def test_recheck_reads_a_finished_directory(tiny, expected):
    args = ("trtllm", tiny, "--out", expected, "--max-shard-size", "30000", "--recheck")
    assert runs.moeconv(*args).returncode == 0
    (shard, *_) = runs.shards(expected)
    data = bytearray((expected / shard).read_bytes())
    data[-1] ^= 1
    (expected / shard).write_bytes(data)
    found = runs.moeconv(*args)
    assert found.returncode == 6
    assert "is damaged" in found.stderr


def test_a_source_written_to_meanwhile_is_a_source_error(tiny, tmp_path):
    (shard,) = tiny.glob("*.safetensors")
    steps = runs.events(tiny, tmp_path / "out", PIECES)
    next(steps)
    os.utime(shard)
    with pytest.raises(SourceError, match="changed while it was read"):
        list(steps)


def swap(path: Path) -> None:
    """Put another file of the same size and time in its place."""
    other, found = path.with_suffix(".new"), path.stat()
    other.write_bytes(bytes(found.st_size))
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(path)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize("change", [swap, grow, os.utime, Path.unlink])
@pytest.mark.parametrize("name", ["config.json", "*.safetensors"])
@pytest.mark.parametrize("when", ["before the first read", "after"])
def test_a_source_that_is_another_than_was_planned(tiny, tmp_path, change, name, when):
    """Names, sizes and config are of one file, and bytes would be of another."""
    (path,) = tiny.glob(name)
    plan, checkpoint = runs.plan(tiny, PIECES)
    directory = OutputDirectory(tmp_path / "out", plan.id, plan.identity)
    steps = convert(plan, checkpoint, directory, CpuKernels(), Limits(1, 1 << 30))
    if when == "after":
        next(steps)
    change(path)
    with pytest.raises(SourceError, match=r"changed while it was read|cannot be read"):
        list(steps)
    assert not directory.is_sealed()


def first_shards(source: Path, out: Path, count: int) -> Iterator[Any]:
    found = 0
    for event in runs.events(source, out, PIECES):
        if hasattr(event, "sha256"):
            found += 1
            yield event
        if found == count:
            return


def test_a_source_cut_meanwhile_is_a_source_error(tiny, expected, tmp_path):
    (shard,) = tiny.glob("*.safetensors")
    whole = shard.read_bytes()
    steps = runs.events(tiny, tmp_path / "out", PIECES)
    next(steps)
    os.truncate(shard, len(whole) // 2)
    with pytest.raises(SourceError, match=r"ended inside|changed while"):
        list(steps)
    shard.write_bytes(whole)
    runs.run(tiny, tmp_path / "out", PIECES)
    assert runs.tree(tmp_path / "out") == runs.tree(expected)


# CASES 29: the disk is full.


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            yield disk
            subprocess.run(["umount", str(disk)], check=True)
            return
    pytest.skip("mounting a small tmpfs needs root")


def test_a_disk_that_fills_up_meanwhile(make_checkpoint, tmp_path, small_disk):
    source = make_checkpoint("big", experts=4, hidden=128, intermediate=128, layers=1)
    expected = runs.run(source, tmp_path / "expected", PIECES)
    out, filler = small_disk / "out", small_disk / "filler"
    steps = runs.events(source, out, PIECES)
    next(steps)
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(OutputError, match="No space left on device") as error:
        list(steps)
    assert "make space" in str(error.value.hint)
    filler.unlink()
    runs.run(source, out, PIECES)
    assert runs.tree(out) == runs.tree(expected)


def test_a_disk_that_is_too_small_is_refused_at_once(make_checkpoint, small_disk):
    source = make_checkpoint("big", experts=8)
    done = runs.moeconv("trtllm", source, "--out", small_disk / "out")
    assert done.returncode == 5
    assert "are needed" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_may_not_grow(tiny, expected, tmp_path):
    """The same without root: the system refuses files above a size."""
    args = ("trtllm", tiny, "--out", tmp_path / "out", "--max-shard-size", "30000")
    code, out, err = runs.driven("fsize", 20_000, *args)
    assert (code, out) == (5, "")
    assert "Traceback" not in err
    assert "cannot be written: File too large" in err
    assert runs.moeconv(*args).returncode == 0
    assert runs.tree(tmp_path / "out") == runs.tree(expected)


# CASES 31 and 32: two processes, and Ctrl-C.


def wait_for(found: Callable[[], object], timeout_s: float = 20) -> None:
    end_s = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < end_s, "nothing happened"
        time.sleep(0.02)


def renamed(messages: str) -> list[str]:
    return [line.split()[1] for line in messages.splitlines() if line.startswith("renamed ")]


def test_two_processes_share_the_work(make_checkpoint, tmp_path):
    source = make_checkpoint(**{**SMALL, "experts": 10})  # many jobs, so that both get some
    expected, out = runs.run(source, tmp_path / "expected", PIECES), tmp_path / "out"
    args = ("trtllm", source, "--out", out, "--max-shard-size", "30000", "--workers", "1")
    both = [runs.start("slow", 0.3, *args)]
    wait_for(lambda: list(out.glob(".moeconv/tmp/*")))
    both.append(runs.start("slow", 0.01, *args))  # in time, also on a busy machine
    ends = [process.ended() for process in both]
    messages = [end.stderr for end in ends]
    assert [end.returncode for end in ends] == [0, 0], messages
    assert runs.tree(out) == runs.tree(expected)
    done = [renamed(text) for text in messages]
    assert len(done[0] + done[1]) == len(runs.shards(out)), "a job was done twice"
    assert all(done), "one of the two did nothing"


def test_another_plan_is_refused_while_one_runs(tiny, tmp_path):
    out = tmp_path / "out"
    process = runs.start("slow", 0.05, "trtllm", tiny, "--out", out)
    wait_for(lambda: list(out.glob(".moeconv/tmp/*")))
    other = runs.moeconv("trtllm", tiny, "--out", out, "--tp", "2")
    assert other.returncode == 5
    assert "tp (any there, 2 now)" in other.stderr
    assert process.ended().returncode == 0


def test_ctrl_c_stops_and_the_same_command_resumes(tiny, expected, tmp_path):
    out = tmp_path / "out"
    args = ("trtllm", tiny, "--out", out, "--max-shard-size", "30000", "--workers", "1")
    process = runs.start("slow", 0.15, *args)
    wait_for(lambda: runs.shards(out))
    process.send_signal(signal.SIGINT)
    done = process.ended()
    assert done.returncode == 130, done.stderr
    assert "run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (out / "moeconv.json").exists()
    assert runs.moeconv(*args).returncode == 0
    assert runs.tree(out) == runs.tree(expected)
