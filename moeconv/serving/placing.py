"""What both engines' loaders share: which module takes which stack, and in whose storage.

An engine builds its model as always, with parameters in the checkpoint's shapes. Each parameter's
own storage is then seen in the final dtype and shape, and this rank's bytes are read into it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from moeconv.errors import UnsupportedError, VerifyError

if TYPE_CHECKING:
    from moeconv.output.manifest import StackEntry
    from moeconv.serving.reader import ConvertedDirectory, Rank, RankTensor

DTYPES: Final = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""What the parameters of every layout are made of, by safetensors dtype code."""

Finish: TypeAlias = "Callable[[torch.nn.Module], None]"
"""Sets up what the engine's own transform leaves behind beside the parameters."""

_DONE: Final = "_moeconv_placed"
_SHOWN: Final = 3


_OWN: Final = ("w13_", "w2_")
"""Parameters of the experts themselves; a module may hold others, as the gate's correction bias."""


@dataclass(frozen=True, slots=True)
class Method:
    """One row: a way in which an engine computes MoE layers, and the layouts that it reads.

    Attributes
    ----------
    name
        `module:class` of the method; of this very class, since a subclass may do otherwise.
    layouts
        Ids of the layouts that hold its bytes.
    backend, experts
        What the engine must have chosen: name of the enum's member, and of the experts class
        (any if empty).
    remedy
        What makes it choose that.
    finish
        The tail of the engine's transform.
    sources
        Parameters that take the storage of one with another name.
    fresh
        Parameters that the engine makes only in its transform.
    drop
        Parameters of the checkpoint that nothing reads afterwards.
    unread
        Parameters that stay without converted bytes.
    keeps_shape
        The parameters keep their shape: only their bytes are in another order.
    pads_late
        The engine's transform, and not its allocation, pads.
    """

    name: str
    layouts: frozenset[str]
    backend: str
    remedy: str
    finish: Finish
    experts: frozenset[str] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict)
    fresh: frozenset[str] = frozenset()
    drop: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    keeps_shape: bool = False
    pads_late: bool = False

    def matches(self, quant_method: object, layout: str) -> bool:
        """Whether this is the row of a layer's method, for a layout."""
        module, _, name = self.name.partition(":")
        if layout not in self.layouts or type(quant_method).__name__ != name:
            return False
        return type(quant_method) is getattr(import_module(module), name)

    def check(self, name: str, backend: str, experts: str) -> None:
        """Refuse a choice of the engine that reads other bytes.

        Raises
        ------
        UnsupportedError
            It chose something else; the message names the flag.
        """
        if backend != self.backend or (self.experts and experts not in self.experts):
            message = (
                f"`{name}`: the engine chose {backend} ({experts}), but the files are made for "
                f"{self.backend}: {self.remedy}"
            )
            raise UnsupportedError(message)


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


def check_new(name: str, module: torch.nn.Module) -> None:
    """Refuse to fill a module twice.

    Raises
    ------
    UnsupportedError
        It is filled.
    """
    if getattr(module, _DONE, False):
        message = f"`{name}` is filled: loading into a running model is not supported; restart it"
        raise UnsupportedError(message)


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


def place_all(
    jobs: Iterable[Assigned],
    install: Callable[[Assigned, RankTensor, torch.Tensor], None],
    *,
    threads: int | None,
    check: bool,
) -> None:
    """Read every tensor into its module's own memory, and let the engine's loader install it."""
    jobs = list(jobs)
    targets = [(job, tensor, memory(job, tensor)) for job in jobs for tensor in job.tensors]
    ranks = {id(job.rank): job.rank for job in jobs}
    for key, rank in ranks.items():
        mine = [(tensor, out) for job, tensor, out in targets if id(job.rank) == key]
        rank.read_all(mine, threads=threads, check=check)
    for job, tensor, out in targets:
        install(job, tensor, out)


def memory(job: Assigned, tensor: RankTensor) -> torch.Tensor:
    """Return where a tensor's bytes go: the parameter's own storage, if it is large enough.

    The engine's transform pads some FP4 layers beyond what it allocated; the old storage is then
    freed before the new one is made. Dtypes are given: an engine loads under its own default.
    """
    dtype, shape = DTYPES[tensor.spec.dtype], tensor.spec.shape
    module, method = job.module, job.method
    parameters = dict(module.named_parameters(recurse=False))
    device = next(iter(parameters.values())).device
    if tensor.param in method.fresh:
        return torch.empty(shape, dtype=dtype, device=device)
    parameter = parameters[method.sources.get(tensor.param, tensor.param)]
    raw = parameter.data.view(-1).view(torch.uint8)
    if raw.numel() < tensor.nbytes:
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device)
    if method.keeps_shape:
        return parameter.data
    return raw[: tensor.nbytes].view(dtype).view(shape)


def finish(job: Assigned) -> None:
    """Drop what nothing reads any more, and mark the module as filled."""
    for name in job.method.drop:
        if name in dict(job.module.named_parameters(recurse=False)):
            delattr(job.module, name)
    setattr(job.module, _DONE, True)


def passed_through(converted: ConvertedDirectory) -> Iterator[str]:
    """Yield the names of tensors that are not converted."""
    return (entry.name for entry in converted.manifest.weights)


def _layer_number(path: str) -> int | None:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(found[1]) if found else None
