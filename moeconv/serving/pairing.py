"""Which module of a model takes which stack? Decided whole before a byte is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from moeconv.errors import UnsupportedError, VerifyError

if TYPE_CHECKING:
    import torch

    from moeconv.output.manifest import StackEntry
    from moeconv.serving.methods import Method
    from moeconv.serving.rank import Rank, RankTensor
    from moeconv.serving.reader import ConvertedDirectory

_SHOWN: Final = 3
_OWN: Final = ("w13_", "w2_")
"""Parameters of the experts themselves; a module may hold others, as the gate's correction bias."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """A module that takes a stack: what it reads, and how its method takes it."""

    name: str
    module: torch.nn.Module
    method: Method
    rank: Rank
    tensors: tuple[RankTensor, ...]


def pair(
    modules: Iterable[str], stacks: Iterable[StackEntry], rename: Callable[[str], str | None]
) -> dict[str, StackEntry]:
    """Return the stack of each module: by the model's own renaming of checkpoint names.

    Some models rename in their nested parts only; there the layer number decides, where one module
    and one stack have it.
    """
    left, rest = list(modules), []
    found: dict[str, StackEntry] = {}
    for stack in stacks:
        renamed = (rename(f"{stack.prefix}.") or "").removesuffix(".")
        name = next((name for name in (renamed, stack.prefix) if name in left), None)
        if name is None:
            rest.append(stack)
        else:
            found[name] = stack
            left.remove(name)
    for stack in rest:
        names = [name for name in left if _layer_number(name) == stack.layer]
        if len(names) == 1 and sum(other.layer == stack.layer for other in rest) == 1:
            found[names[0]] = stack
            left.remove(names[0])
    return found


def check_pairs(
    paired: Mapping[str, StackEntry], stacks: Iterable[StackEntry], *, is_staged: bool
) -> None:
    """Refuse to leave a stack out, but for those of other pipeline stages.

    Raises
    ------
    UnsupportedError
        A stack has no module.
    """
    taken = {stack.prefix for stack in paired.values()}
    absent = [stack.prefix for stack in stacks if stack.prefix not in taken]
    if absent and not is_staged:
        shown = ", ".join(f"`{prefix}`" for prefix in absent[:_SHOWN])
        message = f"the model has no experts module for {len(absent)} of the stacks: {shown}"
        raise UnsupportedError(message)


def check_sizes(name: str, stack: StackEntry, found: tuple[int, int, int, bool]) -> None:
    """Refuse a module whose (experts, hidden, intermediate, gated) are not its stack's.

    Raises
    ------
    VerifyError
        They are others.
    """
    expected = (stack.experts, stack.hidden, stack.intermediate, stack.gated)
    if found != expected:
        message = (
            f"`{name}` has (experts, hidden, intermediate, gated) = {found}, but the converted "
            f"`{stack.prefix}` has {expected}"
        )
        raise VerifyError(message, hint="config.json was changed after the conversion")


def check_coverage(assigned: Assigned) -> None:
    """Hold converted tensors and parameters against each other: each of both exactly once.

    Raises
    ------
    VerifyError
        One is missing.
    """
    method, tensors = assigned.method, assigned.tensors
    finals = {source: final for final, source in method.sources.items()}
    ignored = {*method.drop, *method.unread}
    wanted = {
        finals.get(name, name)
        for name, parameter in assigned.module.named_parameters(recurse=False)
        if name.startswith(_OWN) and name not in ignored and parameter is not None
    } | method.fresh
    held = {tensor.param for tensor in tensors}
    odd = sorted(wanted ^ held)
    if odd or len(held) != len(tensors):
        message = (
            f"`{assigned.name}`: expected converted bytes of {', '.join(sorted(wanted))}, found "
            f"{', '.join(sorted(held))}"
        )
        raise VerifyError(message, hint=f"first difference: {odd[0] if odd else 'twice'}")
    for tensor in tensors:
        _check_storage(assigned, tensor)


def _check_storage(job: Assigned, tensor: RankTensor) -> None:
    """Hold a tensor's size against the parameter's, since the kernel's sizes follow the latter."""
    if tensor.param in job.method.fresh:
        return
    parameter = job.module.get_parameter(job.method.sources.get(tensor.param, tensor.param))
    held = parameter.numel() * parameter.element_size()
    is_pair = tensor.param.endswith("_scale_2")  # one for gate and one for up, until it is loaded
    grows = job.method.pads_late and held < tensor.nbytes
    if held != tensor.nbytes and not grows and not (is_pair and held == 2 * tensor.nbytes):
        message = (
            f"`{job.name}`: the engine holds {held} bytes of {tensor.param}, but the layout has "
            f"{tensor.nbytes}"
        )
        raise VerifyError(message, hint="the engine pads these sizes in another way")


def passed_through(converted: ConvertedDirectory) -> Iterator[str]:
    """Yield the names of tensors that are not converted."""
    return (entry.name for entry in converted.manifest.weights)


def _layer_number(path: str) -> int | None:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(found[1]) if found else None
