"""Can this memory be filled, and is it one tensor's alone? Asked of all before a byte is read."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

if TYPE_CHECKING:
    import torch

    from moeconv.serving.rank import RankTensor
    from moeconv.tensors import Bytes

    Out: TypeAlias = Bytes | torch.Tensor


def fillable(tensor: RankTensor, out: Out) -> Out:
    """Return host memory as bytes, and GPU memory as it is.

    Raises
    ------
    ValueError
        It has gaps or another size, or what is written there would not be seen.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out, torch.Tensor):
        return _of_torch(tensor, out)
    if isinstance(out, np.ndarray):
        array = np.asarray(out)
    else:
        try:
            array = np.asarray(memoryview(cast("bytearray", out)))
        except TypeError:
            # What numpy makes of a list is a copy, which nobody would see.
            raise ValueError(_wrong(tensor, f"a {type(out).__name__}")) from None
    if not array.flags.writeable:
        raise ValueError(_wrong(tensor, "memory that may only be read"))
    if array.dtype.hasobject:
        raise ValueError(_wrong(tensor, "Python's own objects"))
    _check_size(tensor, array.nbytes, contiguous=array.flags.c_contiguous)
    return array.reshape(-1).view(np.uint8)


def check_apart(work: Iterable[tuple[RankTensor, Out]]) -> None:
    """Refuse memory of two tensors that overlaps: one would overwrite the other.

    Raises
    ------
    ValueError
        There is some.
    """
    # Host and GPU memory share one space of addresses, so one order holds them all.
    ranges = sorted((_address(out), out.nbytes, _name(tensor)) for tensor, out in work)
    for (begin, size, name), (following, more, other) in itertools.pairwise(ranges):
        if following < begin + size and more:
            message = f"`{name}` and `{other}` are given memory that overlaps"
            raise ValueError(message)


def _of_torch(tensor: RankTensor, out: torch.Tensor) -> Out:
    import torch

    if out.layout is not torch.strided or out.device.type not in {"cpu", "cuda"}:
        where = f"{out.device.type} memory" if out.layout is torch.strided else str(out.layout)
        raise ValueError(_wrong(tensor, where))
    _check_size(tensor, out.nbytes, contiguous=out.is_contiguous())
    if out.is_cuda:
        return out
    array: Bytes = out.detach().view(-1).view(torch.uint8).numpy()
    return array


def _address(out: Out) -> int:
    return out.ctypes.data if isinstance(out, np.ndarray) else out.data_ptr()


def _check_size(tensor: RankTensor, nbytes: int, *, contiguous: bool) -> None:
    if not contiguous:
        raise ValueError(_wrong(tensor, "memory with gaps"))
    if nbytes != tensor.nbytes:
        raise ValueError(_wrong(tensor, f"{nbytes} bytes"))


def _wrong(tensor: RankTensor, found: str) -> str:
    return f"`{_name(tensor)}` takes {tensor.nbytes} contiguous bytes to be filled, not {found}"


def _name(tensor: RankTensor) -> str:
    return f"{tensor.prefix}.{tensor.param}"
