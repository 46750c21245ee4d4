"""What is asked for together."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from moeconv.checkpoint.extents import GAP_BYTES, plan_extents
from moeconv.checkpoint.origin import Span

MB = 1 << 20


@st.composite
def orders(draw: st.DrawFn) -> list[Span]:
    """Spans of two files, in an order of their own."""
    spans = []
    for file in ("a", "b"):
        at = 0
        for size in draw(st.lists(st.integers(1, 40), max_size=20)):
            at += draw(st.integers(0, 3)) * GAP_BYTES
            spans.append(Span(file, at, size))
            at += size
    return draw(st.permutations(spans))


@given(orders(), st.integers(0, 300), st.integers(1, 4 * GAP_BYTES))
def test_every_span_is_in_one_extent_that_memory_holds(
    spans: list[Span], room: int, most: int
) -> None:
    extents = plan_extents(spans, room, most)
    assert sorted(i for extent in extents for i in extent.spans) == list(range(len(spans)))
    waiting = [0] * len(spans)
    for extent in extents:
        first = min(extent.spans)
        assert first == extent.spans[0]
        for i in extent.spans:
            span = spans[i]
            assert span.file == extent.file
            assert extent.begin <= span.begin
            assert span.begin + span.nbytes <= extent.end
            for at in range(first, i):
                waiting[at] += span.nbytes
        assert len(extent.spans) == 1 or extent.nbytes <= most
    assert max(waiting, default=0) <= room
    assert [extent.spans[0] for extent in extents] == sorted(it.spans[0] for it in extents)


def by_name(experts: int, sizes: Mapping[str, int]) -> dict[tuple[str, str], Span]:
    """Lay tensors out as writers order them: by name, an expert's together, 10 before 2."""
    spans, at = {}, 0
    for name in sorted((str(i), part) for i in range(experts) for part in sizes):
        spans[name] = Span("a", at, sizes[name[1]])
        at += sizes[name[1]]
    return spans


def as_written(spans: Mapping[tuple[str, str], Span], *parameters: str) -> list[Span]:
    """Return what is read for each parameter, expert after expert."""
    experts = range(len({name for name, _ in spans}))
    return [spans[str(i), part] for it in parameters for i in experts for part in it.split()]


def test_the_experts_of_a_layer_come_in_few_requests():
    spans = by_name(128, dict.fromkeys(("down", "gate", "up"), 3 * MB // 2))
    order = as_written(spans, "gate up", "down")
    assert len(plan_extents(order, 300 * MB, 16 * MB)) < 64  # memory for the layer
    half = plan_extents(order, 64 * MB, 16 * MB)
    assert len(half) < 0.6 * len(order)  # as many downs wait as there is room for
    assert sum(extent.nbytes for extent in half) == sum(span.nbytes for span in order)


def test_scales_come_with_their_weights():
    """NVFP4 of Qwen3-30B, in memory for the scales of a layer, but not for its weights."""
    sizes = {"down": 786432, "down_scale": 98304, "down_scale_2": 4}
    sizes |= {
        name.replace("down", part): it for part in ("gate", "up") for name, it in sizes.items()
    }
    spans = by_name(128, sizes)
    order = as_written(
        spans,
        "gate up",
        "gate_scale up_scale",
        "gate_scale_2 up_scale_2",
        "down",
        "down_scale",
        "down_scale_2",
    )
    found = plan_extents(order, 64 * MB, 16 * MB)
    assert len(found) < 2 * 128  # two and less for each expert, of nine tensors
    assert sum(extent.nbytes for extent in found) < 1.001 * sum(span.nbytes for span in order)


def test_scales_between_weights_are_asked_for_alone():
    spans = [Span("a", at * 4 * MB, 1000) for at in range(10)]
    assert len(plan_extents(spans, MB, 16 * MB)) == 10
