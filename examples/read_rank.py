"""Read the experts of one rank into memory, in the order that the kernel takes.

Usage: `python examples/read_rank.py CONVERTED TP_SIZE TP_RANK`
"""

from __future__ import annotations

import sys

import torch

from moeconv.serving import Rank, open_converted


def read(rank: Rank) -> dict[str, torch.Tensor]:
    """Return the rank's parameters by name; any memory that numpy can see would do for them."""
    parameters = {}
    for tensor in rank.tensors():
        parameter = torch.empty(tensor.spec.shape, dtype=torch.bfloat16)
        rank.read_into(tensor, parameter.view(torch.uint8).flatten().numpy())
        parameters[f"{tensor.prefix}.{tensor.param}"] = parameter
    return parameters


if __name__ == "__main__":
    tp_size, tp_rank = int(sys.argv[2]), int(sys.argv[3])
    with open_converted(sys.argv[1]) as converted:
        view = converted.rank(tp_size=tp_size, tp_rank=tp_rank)
        for name, parameter in read(view).items():
            print(f"{name}  {list(parameter.shape)}  {parameter.nbytes / 1e6:.1f} MB")
        print(f"{sum(tensor.read_bytes for tensor in view.tensors()) / 1e6:.1f} MB were read")
