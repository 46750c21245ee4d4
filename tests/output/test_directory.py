"""Whose directory is it? Joined by the same plan, refused to another, never taken from others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from moeconv.conversion.budget import Limits
from moeconv.conversion.convert import convert
from moeconv.conversion.seal import seal
from moeconv.errors import OutputError
from moeconv.kernels.cpu import CpuKernels
from moeconv.output.directory import OutputDirectory
from moeconv.output.ownership import check_output
from moeconv.share import Share
from tests import runs
from tests.runs import Wanted

SMALL = Wanted(max_shard_bytes=30_000)


def begin(source: Path, out: Path, wanted: Wanted = runs.DEFAULT) -> Path:
    """Convert as far as the first shard."""
    for event in runs.events(source, out, wanted):
        if hasattr(event, "sha256"):
            break
    return out


@pytest.mark.parametrize("stage", [begin, runs.run], ids=["half", "finished"])
@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Wanted(tp=2), r"differs in tp \(any there, 2 now\)"),
        (Wanted(layers=(0, 0)), r"layers \(all there, 0-0 now\)"),
        (Wanted(max_shard_bytes=400_000), r"max shard size \(1000000000 there, 400000 now\)"),
    ],
    ids=["tp", "layers", "shards"],
)
def test_another_plan_is_refused_with_what_differs(source, tmp_path, stage, wanted, words):
    out = stage(source, tmp_path / "out")
    before = runs.tree(out)
    with pytest.raises(OutputError, match=words):
        next(runs.events(source, out, wanted))
    assert {k: v for k, v in runs.tree(out).items() if "locks" not in k} == {
        k: v for k, v in before.items() if "locks" not in k
    }


@pytest.mark.parametrize("stage", [begin, runs.run], ids=["half", "finished"])
def test_another_source_is_refused(make_checkpoint, tmp_path, stage):
    out = stage(make_checkpoint("one"), tmp_path / "out")
    with pytest.raises(OutputError, match="differs in source files"):
        next(runs.events(make_checkpoint("two", seed=1), out))


def test_the_same_plan_has_nothing_to_do(source, converted):
    before = runs.tree(converted)
    assert list(runs.events(source, converted)) == []
    assert runs.tree(converted) == before


def test_a_foreign_directory_is_not_written_to(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match="not empty and not a moeconv directory"):
        next(runs.events(source, out))
    with pytest.raises(OutputError, match="`--overwrite` does not touch it"):
        next(runs.events(source, out, overwrite=True))
    assert runs.tree(out) == {"thesis.tex": b"years of work"}


def test_a_file_in_the_way_is_refused(source, tmp_path):
    (tmp_path / "out").write_text("a file")
    for overwrite in (False, True):
        with pytest.raises(OutputError):
            next(runs.events(source, tmp_path / "out", overwrite=overwrite))
    assert (tmp_path / "out").read_text() == "a file"


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_source_is_no_output_directory(source, overwrite):
    before = runs.tree(source)
    with pytest.raises(OutputError):
        next(runs.events(source, source, overwrite=overwrite))
    assert runs.tree(source) == before


@pytest.mark.parametrize("stage", [begin, runs.run], ids=["half", "finished"])
def test_overwrite_replaces_another_plan(source, tmp_path, stage):
    expected = runs.run(source, tmp_path / "expected", Wanted(tp=2))
    out = stage(source, tmp_path / "out")
    runs.run(source, out, Wanted(tp=2), overwrite=True)
    assert runs.tree(out) == runs.tree(expected)


def test_overwrite_goes_on_with_an_unfinished_run_of_the_plan(source, tmp_path):
    """Else the same command would not resume, and a share would remove those before it."""
    expected = runs.run(source, tmp_path / "expected", SMALL)
    out = begin(source, tmp_path / "out", SMALL)
    (first, *_) = runs.shards(out)
    before = (out / first).stat().st_mtime_ns
    runs.run(source, out, SMALL, overwrite=True)
    assert (out / first).stat().st_mtime_ns == before
    assert runs.tree(out) == runs.tree(expected)
    runs.run(source, out, SMALL, overwrite=True)
    assert (out / first).stat().st_mtime_ns != before, "a finished one is made again"
    assert runs.tree(out) == runs.tree(expected)


def test_shares_that_all_overwrite_are_joined(make_checkpoint, source, tmp_path):
    out = runs.run(make_checkpoint("other", seed=7), tmp_path / "out")
    command = ("trtllm", source, "--out", out, "--max-shard-size", "30kB", "--overwrite")
    first, second = (runs.moeconv(*command, "--shard-of", share) for share in ("1/2", "2/2"))
    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    assert "goes on" in second.stderr
    assert runs.moeconv("seal", out).returncode == 0


def test_overwrite_never_removes_its_own_source(make_checkpoint, source, tmp_path):
    """The checkpoint lies in the earlier output, as `converted/source`."""
    out = runs.run(source, tmp_path / "out")
    inside = source.rename(out / "source")
    before = runs.tree(inside)
    with pytest.raises(OutputError, match="source"):
        next(runs.events(inside, out, Wanted(tp=2), overwrite=True))
    assert runs.tree(inside) == before


def test_output_inside_the_source_is_no_side_file(source, tmp_path):
    """`cd model; moeconv trtllm .` writes below the source, by default."""
    runs.run(source, source / "first")
    second = runs.run(source, source / "second", Wanted(tp=2))
    assert not [name for name in runs.tree(second) if name.startswith("first/")]


def test_a_damaged_record_is_done_again(source, converted, tmp_path):
    out = begin(source, tmp_path / "out")
    (shard,) = runs.shards(out)
    (out / shard).write_bytes(b"cut short")
    runs.run(source, out)
    assert runs.tree(out) == runs.tree(converted)


def test_no_work_folder_is_left(converted):
    assert not (converted / ".moeconv").exists()
    tops = {path.name for path in converted.iterdir()}
    assert tops == {
        "moeconv.json",
        "config.json",
        "tokenizer.json",
        "experts",
        "weights",
        "restore",
    }


@pytest.mark.parametrize("turn", range(3), ids=["plan", "run", "job"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_another_process_ends_while_this_one_takes_a_lock(
    source, converted, tmp_path, monkeypatch, turn, when
):
    """It seals and tidies up just before, or just after, the folder of locks is asked for."""
    out = begin(source, tmp_path / "out")
    asked, make = 0, os.mkdir

    def mkdir(path: Path, mode: int = 0o777) -> None:
        nonlocal asked
        is_turn = Path(path).name == "locks" and asked == turn
        asked += Path(path).name == "locks"
        try:
            if not is_turn or when == "after":
                make(path, mode)
        finally:
            if is_turn:
                runs.run(source, out)
        if is_turn and when == "before":
            make(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    runs.run(source, out)
    assert asked > turn
    assert runs.tree(out) == runs.tree(converted)


def test_another_process_seals_while_this_one_looks_at_a_record(
    source, converted, tmp_path, monkeypatch
):
    """The lock of the job was free, and its record goes before it is read."""
    out, (plan, checkpoint) = tmp_path / "out", runs.plan(source)
    only = Limits(1, 1 << 30, share=Share(only=True))
    directory = OutputDirectory(out, plan.id, plan.identity)
    for _ in convert(plan, checkpoint, directory, CpuKernels(), only):
        pass
    looks, stat = 0, os.stat

    def look(path: Path, **options: Any) -> os.stat_result:
        nonlocal looks
        is_it = path == out / ".moeconv" / "records" / "0.json"
        looks += is_it
        if is_it and looks == 2:
            seal(out)
        return stat(path, **options)

    again = OutputDirectory(out, plan.id, plan.identity)
    monkeypatch.setattr(os, "stat", look)
    for _ in convert(plan, checkpoint, again, CpuKernels(), Limits(1, 1 << 30)):
        pass
    assert looks > 1
    assert runs.tree(out) == runs.tree(converted)


@pytest.mark.parametrize("name", [".moeconv", ".moeconv/plan.json"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_another_process_ends_while_this_one_looks_at_the_plan(
    source, converted, tmp_path, monkeypatch, name, when
):
    """Its notes are there at one look, and gone at the next."""
    out = begin(source, tmp_path / "out")
    looks, stat = 0, os.stat

    def look(path: Path, **options: Any) -> os.stat_result:
        nonlocal looks
        is_it = path == out / name and options.get("follow_symlinks", True)
        looks += is_it
        if is_it and looks == 1 and when == "before":
            runs.run(source, out)
        try:
            return stat(path, **options)
        finally:
            if is_it and looks == 1 and when == "after":
                runs.run(source, out)

    plan, _ = runs.plan(source)
    monkeypatch.setattr(os, "stat", look)
    check_output(out, plan.id, plan.identity)
    assert looks
    assert runs.tree(out) == runs.tree(converted)
