"""Run one MoE layer from a converted directory, in plain PyTorch, and compare with the source.

    python examples/forward.py CONVERTED SOURCE [TP_SIZE]

The weights of every rank are read as its kernel would get them, brought back to [gate; up] rows by
the inverse of the layout, and used; the sum over the ranks is the layer's output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from read_rank import read
from safetensors import safe_open

from moeconv.serving import open_converted

# Shapes: T tokens, E experts, H hidden, n a rank's part of the intermediate size, M = 2n.


def rows(x_EKMB: torch.Tensor) -> torch.Tensor:
    """Undo K blocks and the shuffle: `[E, K/64, M, 64]` to `[E, M, K]`."""
    x_EMK = x_EKMB.transpose(1, 2).flatten(2)
    # Within 32 rows, row 4a + b was stored as row a + 8b.
    return x_EMK.unflatten(1, (-1, 4, 8)).transpose(2, 3).flatten(1, 3)


def moe(
    x_TH: torch.Tensor, scores_TE: torch.Tensor, w13_EMH: torch.Tensor, w2_EHn: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of all experts' outputs; `w13_EMH` has [gate; up] rows."""
    gate_TEn, up_TEn = torch.einsum("th,emh->tem", x_TH, w13_EMH).chunk(2, dim=-1)
    hidden_TEn = torch.nn.functional.silu(gate_TEn) * up_TEn
    return torch.einsum("ten,ehn->th", scores_TE.unsqueeze(-1) * hidden_TEn, w2_EHn)


def source_weights(source: Path, prefix: str) -> Iterator[torch.Tensor]:
    """Yield gate, up and down of all experts, stacked, from a sharded checkpoint."""
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    count = sum(name.startswith(prefix) and ".gate_proj." in name for name in index)
    for projection in ("gate_proj", "up_proj", "down_proj"):
        names = [f"{prefix}.{expert}.{projection}.weight" for expert in range(count)]
        with safe_open(source / index[names[0]], framework="pt") as file:  # all in one shard
            yield torch.stack([file.get_tensor(name) for name in names]).float()


def main(root: Path, source: Path, tp_size: int) -> None:
    """Compare the two ways for the first MoE layer."""
    with open_converted(root) as converted:
        prefix = converted.manifest.stacks[0].prefix
        ranks = [read(converted.rank(tp_size=tp_size, tp_rank=rank)) for rank in range(tp_size)]
    gate, up, down = source_weights(source, prefix)
    torch.manual_seed(0)
    x_TH = torch.randn(5, down.shape[1])
    scores_TE = torch.rand(5, down.shape[0]).softmax(dim=-1)
    expected = moe(x_TH, scores_TE, torch.cat((gate, up), dim=1), down)

    found = torch.zeros_like(expected)
    for parameters in ranks:
        pairs_EMH = rows(parameters[f"{prefix}.w13_weight"]).float()  # (up 0, gate 0, up 1, …)
        w13_EMH = torch.cat((pairs_EMH[:, 1::2], pairs_EMH[:, 0::2]), dim=1)
        found += moe(x_TH, scores_TE, w13_EMH, rows(parameters[f"{prefix}.w2_weight"]).float())
    torch.testing.assert_close(found, expected)
    print(f"{prefix}: the outputs of TP {tp_size} are those of the source weights")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else 1)
