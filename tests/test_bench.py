"""`moeconv bench`: what it measures is real, what it writes goes away; how fast is not tested."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ET

import pytest

from moeconv.bench.checkpoint import write_checkpoint
from moeconv.bench.moves import measure_kernels
from moeconv.bench.plot import Bar, bars
from moeconv.bench.shapes import SHAPES, Shape, find_shape
from moeconv.bench.whole import SCHEMES, Trial, measure_whole
from moeconv.errors import OutputError, UnsupportedError
from moeconv.kernels.cpu import CpuKernels
from moeconv.layouts import LAYOUTS, named_layout
from tests import runs

SMALL = Shape("small", 4, 128, 128)


@pytest.mark.parametrize(("layout", "scheme"), SCHEMES.items())
def test_the_checkpoint_converts_and_verifies(tmp_path, layout, scheme):
    nbytes = write_checkpoint(tmp_path / "source", scheme, SMALL, 1_000_000)
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
    assert figure.peak_rss_bytes > 10_000_000
    assert not list(tmp_path.iterdir())


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
    with pytest.raises(OutputError, match="bytes free, but about"):
        next(measure_whole(Trial("trtllm-bf16", SMALL, "cpu", 10**15, 1, tmp_path)))
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path):
    picture = tmp_path / "bench.svg"
    args = ("--size", "1MB", "--repeats", "1", "--dir", tmp_path, "--device", "cpu")
    done = runs.moeconv(
        *("bench", "--part", "whole", "--layout", "trtllm-bf16", *args, "--json"),
        *("--plot", picture),
    )
    assert done.returncode == 0, done.stderr
    (line,) = runs.json_lines(done.stdout)
    (whole,) = line["whole"]
    assert (line["event"], whole["layout"], whole["shape"]) == (
        "bench",
        "trtllm-bf16",
        "qwen3-30b-a3b",
    )
    assert whole["of_cp"] > 0
    assert ET.parse(picture).getroot().tag.endswith("svg")  # noqa: S314
    assert [path.name for path in tmp_path.iterdir()] == ["bench.svg"]


@pytest.mark.parametrize(
    "args",
    [
        ("--shape", "llama"),
        ("--layout", "cutlass"),
        ("--layout", "marlin-mxfp4", "--part", "whole"),
    ],
)
def test_what_cannot_be_measured_is_said(args):
    with pytest.raises(UnsupportedError, match=r"nothing to measure|no shape|no layout"):
        runs.invoke("bench", *args, "--device", "cpu")


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
