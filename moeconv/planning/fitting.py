"""Can this layout hold these experts? By scheme, order and sizes, before any byte is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from moeconv.errors import MoeconvError, SourceError, UnsupportedError

if TYPE_CHECKING:
    from moeconv.layouts.layout import Geometry, Layout
    from moeconv.planning.stacks import Stack

TP_SIZES: Final = (1, 2, 4, 8, 16, 32)
"""Tensor-parallel sizes that reports try; readers take any."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Which stacks a layout takes, which it leaves as they are, and why not the others."""

    taken: tuple[Stack, ...]
    left: tuple[Stack, ...]
    problems: tuple[MoeconvError, ...]


def fit(stacks: Iterable[Stack], layout: Layout, tp: int | None) -> Fit:
    """Hold every stack against a layout, for any TP size or for one."""
    taken: list[Stack] = []
    left: list[Stack] = []
    problems: list[MoeconvError] = []
    for stack in stacks:
        if stack.scheme.name in layout.schemes:
            problem = _misfit(stack, layout, tp)
            if problem:
                problems.append(problem)
            else:
                taken.append(stack)
        elif stack.scheme.name in layout.leaves:
            left.append(stack)
        else:
            problems.append(_wrong_scheme(stack, layout))
    if left and not taken and not problems:
        problems.append(_wrong_scheme(left[0], layout))
    return Fit(tuple(taken), tuple(left), tuple(problems))


def served_tp(layout: Layout, geometry: Geometry) -> tuple[int, ...]:
    """Return the TP sizes that an any-TP file of these experts serves."""
    return tuple(tp for tp in TP_SIZES if layout.tp_refusal(geometry, tp) is None)


def made_tp(layout: Layout, geometry: Geometry) -> tuple[int, ...]:
    """Return the TP sizes that a file of their own can be made for."""
    return tuple(tp for tp in TP_SIZES if layout.rank_refusal(geometry, tp) is None)


def _misfit(stack: Stack, layout: Layout, tp: int | None) -> MoeconvError | None:
    sizes = stack.geometry
    if not (sizes.experts and sizes.hidden and sizes.intermediate):
        message = (
            f"the experts of `{stack.prefix}` are empty: {sizes.experts} experts, hidden "
            f"{sizes.hidden}, intermediate {sizes.intermediate}"
        )
        return SourceError(message)
    reason = layout.refusal(sizes)
    if sizes.order not in layout.orders:
        reason = f"it keeps gate and up in pairs, and these are stored as {sizes.order}"
    if reason is None:
        reason = layout.rank_refusal(sizes, tp or 1)
    if reason is None:
        return None
    message = f"{layout.id} cannot hold the experts of `{stack.prefix}`: {reason}"
    return UnsupportedError(message)


def _wrong_scheme(stack: Stack, layout: Layout) -> UnsupportedError:
    ref = stack.sources["down", "weight"].refs[0]
    message = (
        f"the experts of `{stack.prefix}` are stored as {stack.scheme.name} (`{ref.name}` is "
        f"{ref.spec.dtype}), but {layout.id} takes {' or '.join(layout.schemes)}"
    )
    hint = stack.scheme.advice
    if layout.command == "trtllm" and "fp4" in stack.scheme.name:
        hint = "`moeconv marlin-fp4` takes these"
    return UnsupportedError(message, hint=hint)
