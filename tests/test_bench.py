"""`moeconv bench`: what it measures is real, what it writes goes away; how fast is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from moeconv import report
from moeconv.bench.checkpoint import KINDS, write_checkpoint
from moeconv.bench.moves import measure_kernels
from moeconv.bench.plot import Bar, bars
from moeconv.bench.shapes import SHAPES, Shape, find_shape
from moeconv.bench.whole import Trial, measure_whole
from moeconv.errors import OutputError, UnsupportedError
from moeconv.kernels import pick
from moeconv.kernels.cpu import CpuKernels
from moeconv.kernels.through import Through
from moeconv.layouts import LAYOUTS, named_layout
from tests import runs

SMALL = Shape("small", 4, 128, 128)


@pytest.mark.parametrize(("layout", "kind"), KINDS.items())
def test_the_checkpoint_converts_and_verifies(tmp_path, layout, kind):
    nbytes = write_checkpoint(tmp_path / "source", kind, SMALL, 1_000_000)
    assert 500_000 < nbytes < 2_000_000
    out = tmp_path / "out"
    runs.invoke("convert", tmp_path / "source", "--layout", layout, "--out", out)
    runs.invoke("verify", out, "--read-data", "--source", tmp_path / "source")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_every_layout_has_kernel_figures(layout):
    figures = list(measure_kernels(CpuKernels(), layout, SMALL))
    whole = figures[-1]
    assert whole.what == "layer"
    assert whole.nbytes == sum(figure.nbytes for figure in figures[:-1])
    assert all(figure.seconds > 0 and figure.copy_seconds > 0 for figure in figures)


def test_whole_conversions_take_turns_with_cp_and_leave_nothing(tmp_path):
    trial = Trial("trtllm-bf16", SMALL, "cpu", 1_000_000, 2, tmp_path)
    *said, figure = measure_whole(trial)
    assert said[0] == "writing a checkpoint for trtllm-bf16"
    assert not isinstance(figure, str)
    assert (len(figure.seconds), len(figure.cp_seconds)) == (2, 2)
    assert all(
        0 < own < whole for own, whole in zip(figure.own_seconds, figure.seconds, strict=True)
    )
    assert figure.peak_rss_bytes > 10_000_000
    assert (figure.through_seconds, figure.of_through) == ((), None)
    assert not list(tmp_path.iterdir())


def test_a_cold_run_finds_its_source_on_the_disk(tmp_path, monkeypatch):
    forgotten = []
    monkeypatch.setattr("os.posix_fadvise", lambda *told: forgotten.append(told[1:]))
    *_, figure = measure_whole(
        Trial("trtllm-bf16", SMALL, "cpu", 1_000_000, 1, tmp_path, cold=True)
    )
    assert not isinstance(figure, str)
    assert figure.cold
    # Three files, before the conversion and before the copy.
    assert forgotten.count((0, 0, os.POSIX_FADV_DONTNEED)) == 6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_copy_through_a_device_is_the_same_files(tmp_path, device):
    files = [tmp_path / name for name in "ab"]
    for size, path in zip((0, (1 << 24) + 5), files, strict=True):
        path.write_bytes(os.urandom(size))
    through = Through(device)
    for out in (tmp_path / "one", tmp_path / "two"):
        through.copy(files, out)
        assert [(out / path.name).read_bytes() for path in files] == [
            path.read_bytes() for path in files
        ]


@pytest.mark.gpu
def test_a_conversion_on_a_gpu_has_a_ceiling(tmp_path):
    *_, figure = measure_whole(Trial("marlin-nvfp4", SMALL, "cuda", 1_000_000, 1, tmp_path))
    assert not isinstance(figure, str)
    assert (figure.of_through or 0) > 0


def test_a_measurement_that_stops_leaves_nothing(tmp_path):
    events = measure_whole(Trial("marlin-nvfp4", SMALL, "cpu", 1_000_000, 2, tmp_path))
    next(events)
    next(events)
    assert list(tmp_path.iterdir())
    events.close()
    assert not list(tmp_path.iterdir())


def test_a_cp_that_fails_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "cp"
    fake.write_text("#!/bin/sh\necho 'No space left on device' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    (tmp_path / "work").mkdir()
    with pytest.raises(OutputError, match="`cp` failed with exit code 1: No space left"):
        list(measure_whole(Trial("trtllm-bf16", SMALL, "cpu", 1_000_000, 1, tmp_path / "work")))
    assert not list((tmp_path / "work").iterdir())


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(OutputError, match=r" free, but about .*B are needed"):
        next(measure_whole(Trial("trtllm-bf16", SMALL, "cpu", 10**15, 1, tmp_path)))
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path):
    picture = tmp_path / "bench.svg"
    args = ("--size", "1MB", "--repeats", "1", "--dir", tmp_path, "--device", "cpu")
    done = runs.moeconv(
        *("bench", "--part", "whole", "--layout", "trtllm-bf16", *args, "--json"),
        *("--shape", "qwen3-30b", "--shape", "gpt-oss", "--plot", picture),
    )
    assert done.returncode == 0, done.stderr
    (line,) = runs.json_lines(done.stdout)
    assert line["event"] == "bench"
    shown = [(whole["layout"], whole["shape"]) for whole in line["whole"]]
    assert shown == [("trtllm-bf16", "qwen3-30b-a3b"), ("trtllm-bf16", "gpt-oss-120b")]
    for whole in line["whole"]:
        assert whole["of_cp"] > 0
        assert whole["of_through"] is None
    assert ET.parse(picture).getroot().tag.endswith("svg")  # noqa: S314
    assert [path.name for path in tmp_path.iterdir()] == ["bench.svg"]


@pytest.mark.parametrize(
    "args",
    [
        ("--shape", "llama"),
        ("--layout", "cutlass"),
        ("--layout", "marlin-nvfp4-sglang", "--part", "whole"),
    ],
)
def test_what_cannot_be_measured_is_said(args):
    with pytest.raises(UnsupportedError, match=r"nothing to measure|no shape|no layout"):
        runs.invoke("bench", *args, "--device", "cpu")


def test_a_picture_that_cannot_be_written_is_refused_first(tmp_path):
    for picture in (tmp_path / "absent" / "bench.svg", tmp_path):
        with pytest.raises(OutputError, match=f"cannot write `{picture}`: "):
            runs.invoke("bench", "--dir", tmp_path, "--plot", picture)
    assert not list(tmp_path.iterdir())


def test_whole_conversions_fit_80_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "out", Console(width=80))
    args = ("--size", "1MB", "--repeats", "1", "--dir", tmp_path, "--device", "cpu")
    shown = runs.invoke("bench", "--part", "whole", "--layout", "marlin-mxfp4-gptoss", *args)
    assert all(name in shown for name in ("marlin-mxfp4-gptoss", "qwen3-30b-a3b", "numba"))


def test_it_finds_a_device_by_itself(tmp_path):
    args = ("--size", "1MB", "--repeats", "1", "--dir", tmp_path, "--part", "whole", "--json")
    done = json.loads(runs.invoke("bench", *args, "--layout", "trtllm-bf16"))
    assert [figure["device"] for figure in done["whole"]] == [pick("auto").device]


def test_shapes_are_those_of_the_help():
    shown = " ".join(runs.invoke("bench", "--help").split())
    for shape in SHAPES:
        assert shape.name.partition("-")[0] in shown
        assert find_shape(shape.name) is shape
        assert named_layout("marlin-nvfp4").refusal(shape.geometry) is None
    assert find_shape("qwen3-235b").name == "qwen3-235b-a22b"
    for text in ("", "qwen3", "qwen3-235b-a22b-x"):
        with pytest.raises(UnsupportedError):
            find_shape(text)


def test_bars_are_a_picture():
    text = bars("A <title>", "a copy", [Bar("one & two", 0.5, "50%"), Bar("three", 1.5, "150%")])
    root = ET.fromstring(text)  # noqa: S314
    assert len(root.findall("{*}rect")) == 3
    assert "prefers-color-scheme" in text


def test_cp_is_there():
    assert subprocess.run(["cp", "--version"], capture_output=True, check=False).returncode == 0
