"""Any size, any layout: what a rank takes of the file for every TP is its own engine-order tensor.

And that tensor is, by the definition in `decode`, the rank's part of the source, padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moeconv.kernels.cpu import CpuKernels
from moeconv.layouts import find_layout
from moeconv.layouts.layout import Facts, Geometry, Output, Slice
from moeconv.layouts.marlin.layout import MarlinFp4
from moeconv.layouts.marlin.rows import MARLIN_FP4
from tests.fp4 import decode
from tests.golden import assemble, random_matrices

if TYPE_CHECKING:
    from moeconv.layouts.layout import Placement
    from moeconv.tensors import Bytes

TP_SIZES = (1, 2, 3, 4, 5, 6, 8, 16)
KERNELS = CpuKernels()


@st.composite
def geometries(draw: st.DrawFn, layout: MarlinFp4) -> Geometry:
    """Sizes that a layout takes, whole units and others."""
    hidden = layout.hidden_unit * draw(st.integers(1, 8))
    unit = max(layout.rank_unit, draw(st.sampled_from((16, 32, 64, 96, 128))))
    geometry = Geometry(
        experts=1,
        hidden=hidden,
        intermediate=unit * draw(st.integers(1, 10)),
        gated=layout.gated_only or draw(st.booleans()),
        order=layout.orders[0],  # what takes halves gets pairs taken apart
        reciprocal=draw(st.booleans()),
    )
    assume(layout.refusal(geometry) is None)
    return geometry


facts = st.builds(
    Facts,
    factors=st.tuples(*[st.integers(0, 16).map(lambda n: 2.0**n)] * 2),
    scales=st.just(0),
    flushed=st.just(0),
    negative=st.just(0),
    differing=st.just(0),
    ratios=st.sampled_from(((), ((1.0, 0.75),), ((0.3, 1.0),))),
)


def laid_out(
    layout: MarlinFp4, geometry: Geometry, cut: Slice, known: Facts
) -> Iterator[tuple[Output, Bytes]]:
    scheme = layout.schemes[0]
    matrices = random_matrices(scheme, geometry, 1)
    for output in layout.outputs(geometry, cut):
        out = np.full(output.spec.nbytes, 0xA5, np.uint8)
        source = assemble(output, cut, matrices, scheme)
        KERNELS.lay_out(layout.bind(output, known, 0), source, out)
        yield output, out


def taken(place: Placement, stored: Bytes) -> Bytes:
    """Do what a placement says, an item at a time."""
    size = place.item_bytes
    out = np.zeros(place.spec.nbytes, np.uint8)
    for number, at in enumerate(np.ndindex(*place.stored)):
        there = tuple(at[axis] for axis in place.axes)
        target = int(np.ravel_multi_index(there, place.final)) * size
        begin = place.begin + number * size
        out[target : target + size] = stored[begin : begin + size]
    assert place.begin + math.prod(place.stored) * size == place.end
    return out


def served(layout: MarlinFp4, geometry: Geometry) -> list[int]:
    return [tp for tp in TP_SIZES if layout.tp_refusal(geometry, tp) is None]


def variants() -> Iterator[MarlinFp4]:
    for layout in MARLIN_FP4:
        yield layout
        if "nvfp4" in layout.id:
            yield replace(layout, dtype="float16", reconciles=True)


@pytest.mark.parametrize(
    "layout", tuple(variants()), ids=lambda layout: f"{layout.id}-{layout.dtype}"
)
@given(data=st.data())
def test_every_rank_of_every_size_takes_its_own_tensor(
    layout: MarlinFp4, data: st.DataObject
) -> None:
    geometry = data.draw(geometries(layout))
    known = data.draw(facts)
    if not geometry.gated:
        known = replace(known, ratios=())
    whole = Slice(0, geometry.intermediate)
    stored = {output.param: out for output, out in laid_out(layout, geometry, whole, known)}
    for tp in served(layout, geometry):
        ranks = {0, 1, tp // 2, tp - 1} & set(range(tp))
        for rank in ranks:
            cut = layout.rank_slice(geometry, tp, rank)
            placements = {place.param: place for place in layout.placements(geometry, tp, rank)}
            for output, expected in laid_out(layout, geometry, cut, known):
                place = placements.pop(output.param)
                assert place.spec == output.spec
                held = taken(place, stored[output.param])
                assert held.tobytes() == expected.tobytes(), (tp, rank, output.param)
            assert not placements


@pytest.mark.parametrize("layout", MARLIN_FP4, ids=lambda layout: layout.id)
@given(data=st.data())
def test_a_rank_s_tensor_is_its_part_of_the_source_and_zeros(
    layout: MarlinFp4, data: st.DataObject
) -> None:
    geometry = data.draw(geometries(layout))
    sizes = [tp for tp in TP_SIZES if layout.rank_refusal(geometry, tp) is None]
    assume(sizes)
    tp = data.draw(st.sampled_from(sizes))
    cut = layout.rank_slice(geometry, tp, data.draw(st.integers(0, tp - 1)))
    known = Facts((1.0, 1.0), scales=0, flushed=0, negative=0, differing=0)
    matrices = random_matrices(layout.schemes[0], geometry, 1)
    for output, out in laid_out(layout, geometry, cut, known):
        if output.matrix.part not in {"weight", "bias"}:
            continue
        expected = assemble(output, cut, matrices, layout.schemes[0])
        if output.matrix.part == "bias":
            found = decode.biases(out.tobytes())
            np.testing.assert_array_equal(found, expected.reshape(-1).view(np.uint16))
            continue
        rows, row_bytes = expected.shape
        codes = decode.weight_codes(out.tobytes(), 2 * row_bytes, rows)
        np.testing.assert_array_equal(codes[:, 0::2] | codes[:, 1::2] << 4, expected)


@pytest.mark.parametrize(
    ("intermediate", "tp", "slices"),
    [
        (2880, 4, [(0, 736), (736, 1472), (1472, 2208), (2208, 2880)]),
        (2880, 8, [(384 * r, min(384 * (r + 1), 2880)) for r in range(8)]),
        (160, 4, [(0, 64), (64, 128), (128, 160), (160, 160)]),
        (64, 4, [(0, 32), (32, 64), (64, 64), (64, 64)]),
    ],
)
def test_gpt_oss_s_late_ranks_have_less_or_nothing(
    intermediate: int, tp: int, slices: list[tuple[int, int]]
) -> None:
    layout = next(layout for layout in MARLIN_FP4 if layout.id == "marlin-mxfp4-gptoss")
    geometry = Geometry(1, 256, intermediate, gated=True, order="pairs")
    cuts = [layout.rank_slice(geometry, tp, rank) for rank in range(tp)]
    assert [(cut.start, cut.stop) for cut in cuts] == slices
    empty = [rank for rank, cut in enumerate(cuts) if cut.size == 0]
    for rank in empty:
        for place in layout.placements(geometry, tp, rank):
            assert place.begin == place.end, "nothing is read, and the parameter is zeros"
            assert place.spec.nbytes > 0


@given(hidden=st.integers(1, 40).map(lambda n: 32 * n), rank=st.integers(0, 1))
def test_hidden_padding_does_not_depend_on_tp(hidden: int, rank: int) -> None:
    for layout in MARLIN_FP4:
        order = layout.orders[0]
        geometry = Geometry(1, hidden, 256, gated=True, order=order)
        if layout.refusal(geometry) or layout.tp_refusal(geometry, 2):
            continue
        stored = layout.outputs(geometry, Slice(0, 256))
        for output, place in zip(stored, layout.placements(geometry, 2, rank), strict=True):
            if output.matrix.part == "weight" and output.param.startswith("w13"):
                unit = 256 if "mxfp4" in layout.id and layout.id != "marlin-mxfp4-ct" else 1
                padded = -(-hidden // unit) * unit
                assert 16 * output.spec.shape[2] == padded
                assert 16 * place.spec.shape[0] == padded


def test_dtypes_other_than_the_default_are_rows_of_the_same_table() -> None:
    for layout in MARLIN_FP4:
        half = find_layout(layout.id, "float16")
        assert half
        assert half == replace(layout, dtype="float16")
