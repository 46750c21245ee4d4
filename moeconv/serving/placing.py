"""Where do a rank's bytes go in a model that is built? Into each parameter's own storage.

An engine builds its model as always, with parameters in the checkpoint's shapes. Their storage is
seen in the final dtype and shape, and this rank's bytes are read into it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import torch

from moeconv.errors import UnsupportedError

if TYPE_CHECKING:
    from moeconv.serving.pairing import Assigned
    from moeconv.serving.rank import RankTensor

DTYPES: Final = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""What the parameters of every layout are made of, by safetensors dtype code."""

_DONE: Final = "_moeconv_placed"


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


def place_all(
    jobs: Iterable[Assigned],
    install: Callable[[Assigned, RankTensor, torch.Tensor], None],
    *,
    threads: int | None,
    check: bool,
) -> str:
    """Read every tensor into its module's memory, have the loader install it; say how fast."""
    jobs, started_s = list(jobs), time.perf_counter()
    targets = [(job, tensor, memory(job, tensor)) for job in jobs for tensor in job.tensors]
    ranks = {id(job.rank): job.rank for job in jobs}
    for key, rank in ranks.items():
        mine = [(tensor, out) for job, tensor, out in targets if id(job.rank) == key]
        rank.read_all(mine, threads=threads, check=check)
    for job, tensor, out in targets:
        install(job, tensor, out)
    seconds = max(time.perf_counter() - started_s, 1e-9)
    size_gb = sum(tensor.read_bytes for job in jobs for tensor in job.tensors) / 1e9
    pace = f"{seconds:.3f} s ({size_gb / seconds:.1f} GB/s)"
    return f"Read {size_gb:.2f} GB of experts of {len(jobs)} layers in {pace}"


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
