"""What every layout promises, on every kernel set.

Sizes are truthful, no byte is left as it was, every set gives the same bytes, the inverse gives the
source back, and what a rank reads of the file for any TP is what a file made for that TP holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moeconv.kernels.cpu import CpuKernels
from moeconv.kernels.reference import ReferenceKernels
from moeconv.layouts import LAYOUTS
from moeconv.layouts.layout import Geometry, Layout, Output, Slice
from tests.golden import assemble, random_matrices

if TYPE_CHECKING:
    from moeconv.layouts.layout import Placement
    from moeconv.layouts.verbs import Kernels
    from moeconv.tensors import Bytes

# Layouts that survey a layer first have verbs by expert, and a suite beside their golden digests.
PLAIN = [
    layout for layout in LAYOUTS if not layout.surveyed(Geometry(1, 128, 128, True), Slice(0, 128))
]
SIZES = (
    Geometry(1, 64, 64, True),
    Geometry(1, 128, 192, True),
    Geometry(1, 64, 80, True),
    Geometry(1, 64, 96, False),
    Geometry(1, 128, 320, False),
)


def ordered(layout: Layout, geometry: Geometry) -> Geometry:
    """Return the sizes with gate and up in the order that the layout's sources have them."""
    return replace(geometry, order="pairs") if getattr(layout, "keeps_pairs", False) else geometry


CASES = [
    pytest.param(
        layout, ordered(layout, sizes), id=f"{layout.id}-{sizes.hidden}-{sizes.intermediate}"
    )
    for layout in PLAIN
    for sizes in SIZES
    if layout.refusal(sizes) is None
]
few = settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much])
geometries = st.builds(
    Geometry,
    experts=st.just(1),
    hidden=st.integers(1, 2).map(lambda blocks: 64 * blocks),
    intermediate=st.one_of(st.integers(1, 200), st.integers(1, 12).map(lambda n: 32 * n)),
    gated=st.booleans(),
)


def laid_out(kernels: Kernels, output: Output, source: Bytes, before: int = 0) -> Bytes:
    out = np.full(output.spec.nbytes, before, np.uint8)
    kernels.lay_out(output.verb, source, out)
    return out


def placed(place: Placement, stored: Bytes) -> Bytes:
    """Do what `Placement` says, in its own words."""
    item = np.dtype(f"V{place.item_bytes}")
    out = np.zeros(place.spec.nbytes, np.uint8)
    taken = stored[place.begin : place.end].view(item).reshape(place.stored).transpose(place.axes)
    out.view(item).reshape(place.final)[tuple(slice(size) for size in taken.shape)] = taken
    return out


def slices(layout: Layout, geometry: Geometry) -> Iterator[Slice]:
    yield Slice(0, geometry.intermediate)
    for tp in (1, 2, 3, 4, 8):
        if layout.rank_refusal(geometry, tp) is None:
            yield layout.rank_slice(geometry, tp, tp - 1)


def outputs(layout: Layout, geometry: Geometry, kernels: Kernels) -> Iterator[tuple[Output, Bytes]]:
    """Yield the outputs of every slice; for Triton's slow interpreter, of two in small sizes."""
    matrices = random_matrices(layout.schemes[0], geometry, seed=0)
    cuts = list(slices(layout, geometry))
    if (kernels.name, kernels.device) == ("triton", "cpu"):
        if geometry.hidden > SIZES[0].hidden:
            pytest.skip("Triton's interpreter takes the small sizes only")
        cuts = [cuts[0], cuts[-1]]
    for cut in cuts:
        for output in layout.outputs(geometry, cut):
            yield output, assemble(output, cut, matrices, layout.schemes[0])


@pytest.mark.parametrize(("layout", "geometry"), CASES)
def test_sizes_are_truthful_and_the_inverse_gives_the_source(layout, geometry, kernels):
    for output, source in outputs(layout, geometry, kernels):
        first, second = (laid_out(kernels, output, source, before) for before in (0xAA, 0x55))
        assert first.tobytes() == second.tobytes(), "some bytes are not written"
        back = np.full(output.matrix.shape, 0xA5, np.uint8)
        kernels.invert(output.verb, first, back)
        assert np.array_equal(back, source)


@pytest.mark.parametrize(("layout", "geometry"), CASES)
def test_every_kernel_set_gives_the_same_bytes(layout, geometry, kernels):
    for output, source in outputs(layout, geometry, kernels):
        expected = laid_out(ReferenceKernels(), output, source)
        assert laid_out(kernels, output, source).tobytes() == expected.tobytes()


@few
@given(geometry=geometries, data=st.data())
@pytest.mark.parametrize("layout", PLAIN, ids=lambda layout: layout.id)
def test_any_size_is_the_reference_and_comes_back(layout, geometry, data):
    geometry = ordered(layout, geometry)
    assume(layout.refusal(geometry) is None)
    matrices = random_matrices(layout.schemes[0], geometry, data.draw(st.integers(0, 99)))
    cut = data.draw(st.sampled_from(list(slices(layout, geometry))))
    for output in layout.outputs(geometry, cut):
        source = assemble(output, cut, matrices, layout.schemes[0])
        stored = laid_out(CpuKernels(), output, source)
        assert stored.tobytes() == laid_out(ReferenceKernels(), output, source).tobytes()
        back = np.full(output.matrix.shape, 0xA5, np.uint8)
        CpuKernels().invert(output.verb, stored, back)
        assert np.array_equal(back, source)


@few
@given(geometry=geometries, tp=st.integers(1, 12))
@pytest.mark.parametrize("layout", PLAIN, ids=lambda layout: layout.id)
def test_a_rank_reads_what_its_own_file_would_hold(layout, geometry, tp):
    """One range of each stored expert, placed, is the engine-order tensor of the rank."""
    geometry = ordered(layout, geometry)
    assume(layout.refusal(geometry) is None)
    assume(layout.tp_refusal(geometry, tp) is None)
    scheme, kernels = layout.schemes[0], CpuKernels()
    matrices = random_matrices(scheme, geometry, 1)
    whole = Slice(0, geometry.intermediate)
    stored = {
        output.param: laid_out(kernels, output, assemble(output, whole, matrices, scheme))
        for output in layout.outputs(geometry, whole)
    }
    for rank in range(tp):
        cut = layout.rank_slice(geometry, tp, rank)
        placements = {place.param: place for place in layout.placements(geometry, tp, rank)}
        finals = layout.outputs(geometry, cut)
        assert placements.keys() == {output.param for output in finals}
        for output in finals:
            expected = laid_out(kernels, output, assemble(output, cut, matrices, scheme))
            place = placements[output.param]
            assert place.spec == output.spec
            assert 0 <= place.begin <= place.end <= stored[output.param].size
            assert place.end - place.begin == math.prod(place.stored) * place.item_bytes
            held = placed(place, stored[output.param])
            assert held.tobytes() == expected.tobytes()


@few
@given(geometry=geometries, tp=st.integers(1, 12))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_ranks_cover_the_intermediate_size_once(layout, geometry, tp):
    assume(layout.rank_refusal(geometry, tp) is None)
    cuts = [layout.rank_slice(geometry, tp, rank) for rank in range(tp)]
    covered = [i for cut in cuts for i in range(cut.start, cut.stop)]
    assert covered == list(range(geometry.intermediate))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_a_layout_names_its_engines(layout):
    assert layout.engines
    assert all(engine.name and engine.versions and engine.backend for engine in layout.engines)
    assert layout.dtype in {"bfloat16", "float16"}


def test_layouts_have_distinct_names():
    assert len({layout.id for layout in LAYOUTS}) == len(LAYOUTS)
