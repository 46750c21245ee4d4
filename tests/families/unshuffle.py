"""The inverse of `trtllm-bf16` in a few lines of NumPy, written without a look at our kernels.

Legend: M rows of w13, I intermediate size, H hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    import numpy as np


def read_expert(
    root: Path, prefix: str, expert: int, *, intermediate: int, gated: bool
) -> dict[str, np.ndarray]:
    """Return gate, up and down of one expert as the 16-bit patterns of their elements."""
    w13 = _read(root, f"{prefix}.w13_weight", expert)  # [M/32, H/64, 32, 64]
    w2 = _read(root, f"{prefix}.w2_weight", expert)  # [I/64, H, 64]
    rows_MH = _unshuffle(w13.transpose(0, 2, 1, 3).reshape(w13.shape[0] * 32, -1))
    down_HI = _unshuffle(w2.transpose(1, 0, 2).reshape(w2.shape[1], -1))[:, :intermediate]
    up, gate = (rows_MH[0::2], rows_MH[1::2]) if gated else (rows_MH, rows_MH)
    found = {"up": up[:intermediate], "down": down_HI}
    return {"gate": gate[:intermediate], **found} if gated else found


def _unshuffle(rows: np.ndarray) -> np.ndarray:
    """In a block of 32 rows, row `4b + a` of the source lies at `8a + b`."""
    blocks = rows.reshape(-1, 4, 8, rows.shape[1])
    return blocks.transpose(0, 2, 1, 3).reshape(rows.shape)


def _read(root: Path, stem: str, expert: int) -> np.ndarray:
    for path in (root / "experts").glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                if name.rpartition(".")[0] == stem:
                    first, last = map(int, name.rpartition(".")[2].split("-"))
                    if first <= expert <= last:
                        data: torch.Tensor = shard.get_tensor(name)
                        return data[expert - first].view(torch.int16).numpy()
    raise LookupError(stem)
