"""Read the experts of one rank into memory, in the order that the kernel takes.

    python examples/read_rank.py CONVERTED TP_SIZE TP_RANK [DEVICE]

DEVICE is `cpu`, which is the default, or a GPU, as `cuda:0`.
"""

from __future__ import annotations

import sys

import torch

from moeconv.serving import Rank, open_converted

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def read(rank: Rank, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return the rank's parameters by name; the memory is ours, and the bytes go straight there."""
    parameters = {}
    for tensor in rank.tensors():
        dtype = DTYPES[tensor.spec.dtype]
        parameters[f"{tensor.prefix}.{tensor.param}"] = torch.empty(
            tensor.spec.shape, dtype=dtype, device=device
        )
    rank.read_all(zip(rank.tensors(), parameters.values(), strict=True))
    return parameters


if __name__ == "__main__":
    tp_size, tp_rank = int(sys.argv[2]), int(sys.argv[3])
    with open_converted(sys.argv[1]) as converted:
        view = converted.rank(tp_size=tp_size, tp_rank=tp_rank)
        for name, parameter in read(view, *sys.argv[4:5]).items():
            print(f"{name}  {list(parameter.shape)} {parameter.dtype}  {parameter.nbytes:,} bytes")
        print(f"{sum(tensor.read_bytes for tensor in view.tensors()) / 1e6:.1f} MB were read")
