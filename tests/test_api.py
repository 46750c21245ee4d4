"""`import moeconv`: the calls of its docstring, run as written, and quick to import."""

from __future__ import annotations

import doctest
import gc
import math
import shutil
import subprocess
import sys
import weakref
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import moeconv
from moeconv.conversion.budget import Limits
from moeconv.errors import SourceError, UnsupportedError
from moeconv.output.manifest import Manifest
from moeconv.planning.target import Wish
from tests import adding, runs
from tests.fp4.models import Model
from tests.sources import Tiny, write_tiny


def test_the_examples_run(tmp_path, monkeypatch):
    script = adding.ROOT / "examples/make_checkpoint.py"
    subprocess.run([sys.executable, script, tmp_path / "Qwen3-tiny"], check=True)
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(moeconv)
    assert (failed, tried > 5) == (0, True)


def test_a_program_makes_what_the_command_makes(source, tmp_path):
    checkpoint = moeconv.open_checkpoint(str(source))
    plan = moeconv.make_plan(checkpoint, "trtllm-bf16")
    *_, manifest = moeconv.convert(plan, checkpoint, tmp_path / "a", device="cpu")
    runs.invoke("trtllm", source, "--out", tmp_path / "b", "--device", "cpu")
    assert runs.tree(tmp_path / "a") == runs.tree(tmp_path / "b")
    again = moeconv.convert(plan, checkpoint, tmp_path / "a", device="cpu")
    assert list(again) == [manifest]


class Task:
    """Holds a conversion, and itself, so that only a collection finds it when it is dropped."""

    def __init__(self, *args: Any) -> None:
        self.me, self.events = self, moeconv.convert(*args, device="cpu")


def test_a_conversion_that_is_dropped_half_way_lets_go_of_what_it_holds(source, tmp_path):
    checkpoint = moeconv.open_checkpoint(str(source))
    plan = moeconv.make_plan(checkpoint, "trtllm-bf16")
    task = Task(plan, checkpoint, tmp_path / "out")
    next(task.events)
    dropped = weakref.ref(task)
    del task
    gc.collect()
    assert dropped() is None
    assert list(moeconv.convert(plan, checkpoint, tmp_path / "out", device="cpu"))


def test_a_survey_and_a_wish(tmp_path):
    source = Model("modelopt").write(tmp_path / "source")
    checkpoint = moeconv.open_checkpoint(str(source))
    plan = moeconv.make_plan(checkpoint, Wish("marlin-fp4"))
    assert plan.target.layout.id == "marlin-nvfp4"
    next(moeconv.convert(plan, checkpoint, tmp_path / "out", device="cpu"))
    *_, manifest = moeconv.convert(plan, checkpoint, tmp_path / "out", device="cpu")
    assert isinstance(manifest, Manifest)
    assert manifest.facts
    verified = moeconv.verify(tmp_path / "out", read_data=True, source=source, device="cpu")
    assert verified.sources > 0
    shutil.rmtree(tmp_path / "out/experts")
    with pytest.raises(moeconv.MoeconvError):
        moeconv.verify(tmp_path / "out")


def test_the_import_alone_is_quick_and_names_are_what_they_seem():
    code = (
        "import sys, moeconv\n"
        "assert not {'numpy', 'torch', 'safetensors'} & set(sys.modules)\n"
        "import moeconv.conversion.convert, moeconv.verification.verify\n"
        "assert callable(moeconv.convert) and callable(moeconv.verify)\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(moeconv.__all__) <= set(dir(moeconv))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert moeconv.__version__ == metadata.version("moeconv")
    with pytest.raises(AttributeError, match="no attribute `shuffle`"):
        _ = moeconv.shuffle


@pytest.fixture
def planned(source: Path) -> tuple[Any, Any]:
    """A checkpoint and a plan of it."""
    checkpoint = moeconv.open_checkpoint(source)
    return checkpoint, moeconv.make_plan(checkpoint, "trtllm-bf16")


def test_a_plan_goes_with_the_checkpoint_that_it_was_made_of(planned, tmp_path):
    _, plan = planned
    other = moeconv.open_checkpoint(write_tiny(tmp_path / "other", Tiny(seed=7)))
    with pytest.raises(SourceError, match=r"`other`, which differs in source files"):
        next(moeconv.convert(plan, other, tmp_path / "out", device="cpu"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"tp": tp} for tp in (0, -1, True, "2", 2.0)),
        *({"max_shard_bytes": it} for it in (0, -1, 1.5, math.nan, math.inf, "5GB", None)),
    ],
    ids=str,
)
def test_what_is_no_number_of_ranks_or_bytes_is_refused(planned, wrong: dict[str, Any]):
    checkpoint, _ = planned
    with pytest.raises(UnsupportedError, match="expected a whole number of at least 1"):
        moeconv.make_plan(checkpoint, "trtllm-bf16", **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"workers": it} for it in (0, -1, "2", 1.5, 10**23)),
        *({"workers": 1, f"max_{kind}_bytes": -1} for kind in ("host", "device")),
        {"workers": 1, "max_shards": 0},
    ],
    ids=str,
)
def test_limits_that_cannot_be_meant_are_refused(wrong: dict[str, Any]):
    with pytest.raises(UnsupportedError, match="expected a whole number"):
        Limits(**wrong)


def test_what_is_refused_leaves_nothing_behind(planned, tmp_path):
    checkpoint, plan = planned
    wrong: list[dict[str, Any]] = [{"device": None}, {"device": "cpu", "limits": Limits(1, 0)}]
    for options in wrong:
        with pytest.raises(UnsupportedError):
            next(moeconv.convert(plan, checkpoint, tmp_path / "out", **options))
        assert not (tmp_path / "out").exists()


def test_no_layout_and_no_path(planned):
    checkpoint, _ = planned
    layout: Any = 1
    with pytest.raises(UnsupportedError, match="`1` is no layout that moeconv knows"):
        moeconv.make_plan(checkpoint, layout)
    with pytest.raises(SourceError, match="`/nope` is not a directory"):
        moeconv.open_checkpoint(Path("/nope"))


def test_a_rank_is_a_number(converted):
    with moeconv.serving.open(converted) as directory:
        sizes: list[Any] = ["2", 2.0, True, None]
        for size in sizes:
            with pytest.raises(UnsupportedError, match=r"`tp_size` is .*a whole number$"):
                directory.rank(tp_size=size)
