"""Many processes, GPUs and machines: shares of one conversion, and joining them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.conversion.budget import Limits
from moeconv.conversion.convert import convert
from moeconv.conversion.pipeline import Moved
from moeconv.conversion.seal import seal
from moeconv.errors import UnsupportedError
from moeconv.kernels.cpu import CpuKernels
from moeconv.output.directory import OutputDirectory
from moeconv.output.manifest import Manifest
from moeconv.output.records import ShardRecord
from moeconv.share import Share, launched, own_gpu, parse_share, ranks_here
from tests import runs
from tests.fp4.models import Model
from tests.runs import Wanted

MANY = ("--max-shard-size", "100000")
"""Small shards: several for each share."""


@pytest.fixture
def expected(source, tmp_path):
    out = tmp_path / "expected"
    runs.invoke("trtllm", source, "--out", out, *MANY)
    return out


def wait_for(found: Callable[[], object], timeout_s: float = 30) -> None:
    end_s = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < end_s, "nothing happened"
        time.sleep(0.02)


@given(count=st.integers(1, 9), jobs=st.integers(0, 40))
def test_shares_are_all_of_the_work_once(count, jobs):
    shares = [Share(index, count, only=True).jobs(jobs) for index in range(count)]
    assert [job for share in shares for job in share] == list(range(jobs))
    for index, own in enumerate(shares):
        every = Share(index, count).jobs(jobs)
        assert sorted(every) == list(range(jobs))
        assert every[: len(own)] == own


def test_a_share_is_said_as_people_count():
    assert parse_share("1/4") == Share(0, 4, only=True)
    assert parse_share(" 4/4 ").label == "4/4"
    for text in ("0/4", "5/4", "1", "1/0", "-1/4", "a/b", "1/4/2"):
        with pytest.raises(ValueError, match="no share"):
            parse_share(text)


def test_torchrun_says_the_rank_and_the_gpu():
    assert launched({}) == Share()
    assert launched({"RANK": "2", "WORLD_SIZE": "3"}) == Share(2, 3)
    for rank, size in (("3", "3"), ("-1", "2"), ("x", "2"), ("0", "0")):
        with pytest.raises(UnsupportedError, match="is no rank"):
            launched({"RANK": rank, "WORLD_SIZE": size})
    assert own_gpu({}) == "cuda:0"
    assert own_gpu({"LOCAL_RANK": "5"}) == "cuda:5"
    assert ranks_here({}) == ranks_here({"LOCAL_WORLD_SIZE": "0"}) == 1
    assert ranks_here({"LOCAL_WORLD_SIZE": "8"}) == 8


@pytest.mark.parametrize("share", [Share(0, 2), Share(1, 2), Share(2, 3)], ids=str)
def test_each_process_starts_with_its_own_share(source, tmp_path, share):
    plan, checkpoint = runs.plan(source, Wanted(max_shard_bytes=100_000))
    directory = OutputDirectory(tmp_path / "out", plan.id, plan.identity)
    events = convert(plan, checkpoint, directory, CpuKernels(), Limits(1, share=share))
    files = [event.file for event in events if isinstance(event, ShardRecord)]
    assert files[0] == plan.jobs[len(plan.jobs) * share.index // share.count].file
    assert sorted(files) == sorted(job.file for job in plan.jobs)


def test_whoever_watches_sees_what_others_do(source, tmp_path):
    """The bar of one process runs to the end, also for shards that another finished meanwhile."""
    plan, checkpoint = runs.plan(source, Wanted(max_shard_bytes=100_000))
    watched, other = (
        convert(
            plan,
            checkpoint,
            OutputDirectory(tmp_path / "out", plan.id, plan.identity),
            CpuKernels(),
            Limits(1, share=share),
        )
        for share in (Share(0, 2), Share(1, 2, only=True))
    )
    seen = [next(watched)]
    list(other)
    seen += watched
    assert sum(event.nbytes for event in seen if isinstance(event, Moved)) == plan.nbytes
    manifest = seen[-1]
    assert isinstance(manifest, Manifest)
    own = plan.nbytes - sum(
        plan.jobs[n].nbytes for n in Share(1, 2, only=True).jobs(len(plan.jobs))
    )
    assert manifest.run.bytes_written == own


@pytest.mark.parametrize("count", [1, 3])
def test_shares_and_a_seal_are_a_single_run(source, expected, tmp_path, count):
    out = tmp_path / "out"
    for number in range(count, 0, -1):
        runs.invoke("trtllm", source, "--out", out, *MANY, "--shard-of", f"{number}/{count}")
        assert not (out / "moeconv.json").exists()
    runs.invoke("seal", out)
    assert runs.tree(out) == runs.tree(expected)
    runs.invoke("verify", out, "--read-data", "--source", source)


def test_a_source_with_a_card_is_sealed(source, tmp_path):
    (source / "README.md").write_text("a card")
    runs.invoke("trtllm", source, "--out", tmp_path / "expected", *MANY)
    runs.invoke("trtllm", source, "--out", tmp_path / "out", *MANY, "--shard-of", "1/1")
    runs.invoke("seal", tmp_path / "out")
    assert runs.tree(tmp_path / "out") == runs.tree(tmp_path / "expected")


def test_a_seal_that_rechecks_reads_what_each_share_wrote(source, expected, tmp_path):
    out = tmp_path / "out"
    args = ("trtllm", source, "--out", out, *MANY)
    runs.invoke(*args, "--shard-of", "1/1")
    file = out / sorted(runs.shards(out))[1]
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    done = runs.moeconv("seal", out, "--recheck")
    assert done.returncode == 5, done.stdout
    name = str(file.relative_to(out))
    assert f"`{name}` is damaged, and has to be done again" in done.stderr
    assert f"lacks 1 of {len(runs.shards(expected))} shards: `{name}`" in done.stderr
    assert not (out / "moeconv.json").exists()
    runs.invoke(*args, "--shard-of", "1/1")
    runs.invoke("seal", out, "--recheck")
    assert runs.tree(out) == runs.tree(expected)
    runs.invoke("seal", out, "--recheck")
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    runs.invoke("seal", out)
    again = runs.moeconv("seal", out, "--recheck")
    assert again.returncode == 6
    assert f"`{name}` is damaged" in again.stderr


def test_shares_of_machines_that_share_nothing(source, expected, tmp_path):
    for number in (1, 2):
        out = tmp_path / f"machine{number}"
        runs.invoke("trtllm", source, "--out", out, *MANY, "--shard-of", f"{number}/2")
    joined = tmp_path / "joined"
    for number in (2, 1):
        shutil.copytree(tmp_path / f"machine{number}", joined, dirs_exist_ok=True)
    (line,) = runs.json_lines(runs.moeconv("seal", joined, "--json").stdout)
    assert line["event"] == "done"
    assert runs.tree(joined) == runs.tree(expected)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
@pytest.mark.parametrize("what", ["shares", "shards"])
def test_shares_of_two_checkpoints_are_not_joined(make_checkpoint, tmp_path, order, what):
    """Two trainings of one model: names and sizes of shards are the same, their bytes are not."""
    sources = {number: make_checkpoint(f"model{number}", seed=number) for number in (1, 2)}
    for number, source in sources.items():
        out = tmp_path / f"machine{number}"
        share = ("1/1",) if what == "shards" else (f"{number}/2",)
        runs.invoke("trtllm", source, "--out", out, *MANY, "--shard-of", *share)
    joined = tmp_path / "joined"
    first, last = order
    for number in order:
        shutil.copytree(tmp_path / f"machine{number}", joined, dirs_exist_ok=True)
    if what == "shards":  # a copy that was cut before it came to the notes
        shutil.rmtree(joined / ".moeconv")
        shutil.copytree(tmp_path / f"machine{first}" / ".moeconv", joined / ".moeconv")
        last = first
    done = runs.moeconv("seal", joined)
    assert done.returncode == 5, done.stdout
    assert "lacks" in done.stderr
    runs.invoke("trtllm", sources[last], "--out", joined, *MANY)
    runs.invoke("verify", joined, "--read-data", "--source", sources[last])


def test_shares_of_a_surveyed_layout(tmp_path):
    """NVFP4's factor is the layer's: each share surveys all of its scales."""
    source = Model("modelopt").write(tmp_path / "source")
    for number in (1, 2):
        args = ("--shard-of", f"{number}/2", *MANY)
        runs.invoke("marlin-fp4", source, "--out", tmp_path / "shared", *args)
    runs.invoke("seal", tmp_path / "shared")
    runs.invoke("marlin-fp4", source, "--out", tmp_path / "single", *MANY)
    assert runs.tree(tmp_path / "shared") == runs.tree(tmp_path / "single")


def test_a_seal_says_which_shards_are_missing_and_the_command_does_them(source, expected, tmp_path):
    out = tmp_path / "out"
    runs.invoke("trtllm", source, "--out", out, *MANY, "--shard-of", "2/2")
    done = runs.moeconv("seal", out)
    assert done.returncode == 5
    missing = sorted(set(runs.shards(expected)) - set(runs.shards(out)))
    assert f"lacks {len(missing)} of {len(runs.shards(expected))} shards" in done.stderr
    assert f"`{missing[0]}` (shard 1)" in done.stderr
    assert not (out / "moeconv.json").exists()
    runs.invoke("trtllm", source, "--out", out, *MANY)
    assert runs.tree(out) == runs.tree(expected)


def test_a_seal_where_nothing_began_or_all_is_done(source, expected, tmp_path):
    for folder in (tmp_path / "nothing", source):
        done = runs.moeconv("seal", folder)
        assert done.returncode == 5
        assert "holds no conversion that has begun" in done.stderr
    before = runs.tree(expected)
    runs.invoke("seal", expected)
    assert runs.tree(expected) == before


def test_a_share_that_is_none(source):
    done = runs.moeconv("trtllm", source, "--shard-of", "0/4")
    assert done.returncode == 2
    assert "write it as 1/4" in " ".join(done.stderr.split())


def test_another_process_takes_up_the_jobs_of_one_that_died(source, expected, tmp_path):
    out = tmp_path / "out"
    args = ("trtllm", source, "--out", out, *MANY, "--workers", "1")
    first = runs.start("slow", 0.5, *args)
    wait_for(lambda: list(out.glob(".moeconv/tmp/*")))
    second = runs.start("slow", 0.02, *args)
    wait_for(lambda: runs.shards(out))
    first.send_signal(signal.SIGKILL)
    done = second.ended()
    assert done.returncode == 0, done.stderr
    first.ended()
    assert runs.tree(out) == runs.tree(expected)


@pytest.mark.slow
def test_torchrun(source, expected, tmp_path):
    out = tmp_path / "out"
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
    command = [*launch, "moeconv", "trtllm", source, "--out", out, "--device", "cpu", *MANY]
    env = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [*map(str, command)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("converted to") == 1
    assert runs.tree(out) == runs.tree(expected)


def test_a_seal_between_a_shares_last_shard_and_its_end_leaves_nothing(source, tmp_path):
    plan, checkpoint = runs.plan(source, Wanted(max_shard_bytes=100_000))
    out = tmp_path / "out"
    directory = OutputDirectory(out, plan.id, plan.identity)
    events = convert(
        plan, checkpoint, directory, CpuKernels(), Limits(1, share=Share(0, 1, only=True))
    )
    left = len(plan.jobs)
    while left:
        left -= isinstance(next(events), ShardRecord)
    directory.copy_side_files(checkpoint.origin.chunks, checkpoint.side_files)
    seal(out)
    before = runs.tree(out)
    assert list(events) == []
    assert runs.tree(out) == before
    assert not (out / ".moeconv").exists()
