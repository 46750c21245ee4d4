"""What is asked for together."""

from __future__ import annotations

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
    spans: list[Span], window: int, most: int
) -> None:
    extents = plan_extents(spans, window, most)
    assert sorted(i for extent in extents for i in extent.spans) == list(range(len(spans)))
    for extent in extents:
        first = min(extent.spans)
        assert first == extent.spans[0]
        for i in extent.spans:
            span = spans[i]
            assert span.file == extent.file
            assert extent.begin <= span.begin
            assert span.begin + span.nbytes <= extent.end
            between = sum(span.nbytes for span in spans[first : i + 1])
            assert i == first or between <= window
        assert len(extent.spans) == 1 or extent.end - extent.begin <= most
    assert [extent.spans[0] for extent in extents] == sorted(it.spans[0] for it in extents)


def test_the_experts_of_a_layer_come_in_few_requests():
    # As writers order them: by name, the tensors of an expert together, 10 before 2.
    names = sorted((str(i), part) for i in range(128) for part in ("down", "gate", "up"))
    size = 3 * MB // 2
    spans = {name: Span("a", at * size, size) for at, name in enumerate(names)}
    w13 = [spans[str(i), part] for i in range(128) for part in ("gate", "up")]
    order = [*w13, *(spans[str(i), "down"] for i in range(128))]
    assert len(plan_extents(order, 600 * MB, 16 * MB)) < 64  # memory for the layer
    assert len(plan_extents(order, 128 * MB, 16 * MB)) <= 256  # gate and up of an expert together


def test_scales_between_weights_are_asked_for_alone():
    spans = [Span("a", at * 4 * MB, 1000) for at in range(10)]
    assert len(plan_extents(spans, MB, 16 * MB)) == 10
