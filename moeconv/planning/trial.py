"""Which layers does a trial convert, and is it one?"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from moeconv.errors import UnsupportedError

if TYPE_CHECKING:
    from moeconv.planning.stacks import Stack

Range: TypeAlias = "tuple[int, int] | None"


def chosen(
    stacks: tuple[Stack, ...], asked: Range
) -> tuple[tuple[Stack, ...], Range, tuple[str, ...]]:
    """Return the layers that are meant, their range, and what to say of others that were named.

    Parameters
    ----------
    stacks
        All layers with experts, in their order.
    asked
        The first and the last to convert; `None` for all.

    Returns
    -------
    tuple
        The range is `None` where it is all of the model: then the result is no trial.

    Raises
    ------
    UnsupportedError
        None of them has experts.
    """
    if asked is None:
        return stacks, None, ()
    first, last = asked
    begin, end = stacks[0].layer, stacks[-1].layer
    found = tuple(stack for stack in stacks if first <= stack.layer <= last)
    said = f"`--layers {first}-{last}`"
    if not found:
        message = f"{said} holds no layer with experts; they are in {begin} to {end}"
        raise UnsupportedError(message)
    if found == stacks:
        return stacks, None, (f"{said} is all of the model: experts are in {begin} to {end}",)
    if last > end:
        return found, (first, end), (f"{said} ends behind {end}, the last layer with experts",)
    return found, asked, ()
