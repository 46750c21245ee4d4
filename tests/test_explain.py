"""`explain` and `list`: what they show is what conversions use."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.console import Console

from moeconv import report
from moeconv.errors import UnsupportedError
from moeconv.families import FAMILIES
from moeconv.inspection.explanation import explain, rank_bar, row_map
from moeconv.kernels.cpu import CpuKernels
from moeconv.layouts import LAYOUTS, TRTLLM_BF16
from moeconv.layouts.layout import Geometry, Slice
from moeconv.schemes import SCHEMES
from tests import runs

GEOMETRY = Geometry(128, 2048, 768, gated=True)


def test_the_row_map_is_that_of_the_kernels():
    """Lay rows out that hold their own number, and read the map off the result."""
    geometry = Geometry(1, 64, 64, gated=True)
    output = TRTLLM_BF16.outputs(geometry, Slice(0, 64))[0]
    source = np.repeat(np.arange(128, dtype=np.uint16), 64).view(np.uint8).reshape(128, 128)
    out = np.empty(output.spec.nbytes, np.uint8)
    CpuKernels().lay_out(output.verb, source, out)
    held = out.view(np.uint16).reshape(4, 1, 32, 64)[0, 0, :, 0]
    names = [f"gate {row}" if row < 64 else f"up {row - 64}" for row in held]
    title, lines = row_map(TRTLLM_BF16, geometry)
    assert [text for line in lines for text, _ in line] == names
    assert names[:3] == ["up 0", "up 2", "up 4"]
    assert "rows 0 to 31" in title


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranges_are_those_that_ranks_read(layout, tp):
    found, _ = explain(layout.id, GEOMETRY, tp)
    is_paired = "halves" not in layout.orders
    geometry = Geometry(128, 2048, 768, gated=True, order="pairs" if is_paired else "halves")
    for rank in range(tp):
        for one, placement in zip(
            found.parameters, layout.placements(geometry, tp, rank), strict=True
        ):
            assert (one.ranks[rank].begin, one.ranks[rank].end) == (placement.begin, placement.end)
            assert one.engine_bytes == placement.spec.nbytes


def test_a_bar_shows_who_reads_what():
    found, _ = explain("marlin-nvfp4", GEOMETRY, 4)
    bars = {one.name: "".join(text for text, _ in rank_bar(one)) for one in found.parameters}
    assert bars["w13_weight"] == "".join(str(rank) * 16 for rank in range(4))
    assert set(bars["w2_weight_scale_2"]) == {"*"}


def test_a_size_that_needs_a_file_of_its_own():
    found, _ = explain("trtllm-bf16", GEOMETRY, 8)
    assert found.tp_refusal is not None
    assert "no multiple of 64" in found.tp_refusal
    assert (found.padded, found.parameters[0].ranks) == (128, ())
    shown = runs.invoke("explain", "trtllm-bf16", "--tp", "8")
    assert "needs its own (--tp 8)" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("name", "geometry", "words"),
    [
        ("nope", GEOMETRY, "`nope` is no layout"),
        ("trtllm-bf16", Geometry(8, 100, 768, gated=True), "a multiple of 64, found 100"),
        ("marlin-mxfp4", Geometry(8, 256, 768, gated=False), "gated experts only"),
    ],
)
def test_refusals(name, geometry, words):
    with pytest.raises(UnsupportedError, match=words):
        explain(name, geometry, 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
@pytest.mark.parametrize("columns", ["80", "120"])
def test_it_fits_the_terminal_and_has_no_colour_where_there_is_none(layout, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    shown = runs.invoke("explain", layout.id)
    assert "\x1b[" not in shown
    assert max(map(len, shown.splitlines())) <= int(columns)
    assert all(one.name in shown for one in explain(layout.id, GEOMETRY, 2)[0].parameters)
    for engine in layout.engines:
        assert engine.backend.split()[-1] in shown


def test_explain_json():
    shown = json.loads(
        runs.invoke("explain", "trtllm-bf16", "--json", "--tp", "2", "--hidden", "128")
    )
    assert (shown["event"], shown["layout"], shown["tp"]) == ("explanation", "trtllm-bf16", 2)
    assert [len(one["ranks"]) for one in shown["parameters"]] == [2, 2]


def test_list_names_all_there_is(monkeypatch):
    monkeypatch.setattr(report, "out", Console(width=80))
    shown = runs.invoke("list")
    assert all(shown.count(f" {layout.id} ") >= 2 for layout in LAYOUTS)
    assert all(family.name in shown for family in FAMILIES)
    assert all(scheme.name in shown for scheme in SCHEMES)
    listed = json.loads(runs.invoke("list", "--json"))
    assert [row["id"] for row in listed["layouts"]] == [layout.id for layout in LAYOUTS]
    assert [row["name"] for row in listed["families"]] == [family.name for family in FAMILIES]
    assert [row["name"] for row in listed["schemes"]] == [scheme.name for scheme in SCHEMES]
