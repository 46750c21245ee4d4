"""`import moeconv`: the calls of its docstring, run as written, and quick to import."""

from __future__ import annotations

import doctest
import shutil
import subprocess
import sys

import pytest

import moeconv
from moeconv.output.manifest import Manifest
from moeconv.planning.target import Wish
from tests import adding, runs
from tests.fp4.models import Model


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
    with pytest.raises(AttributeError, match="no attribute `shuffle`"):
        _ = moeconv.shuffle
