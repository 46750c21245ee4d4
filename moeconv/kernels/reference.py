"""The definition of right: each verb in plain torch, as the engine's own words put it.

Slow and short. The contract suite holds every other kernel set to these bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from moeconv.layouts.verbs import K_BLOCK_BYTES, SHUFFLE_ROWS

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Verb
    from moeconv.tensors import Bytes


class ReferenceKernels:
    """Satisfies `layouts.verbs.Kernels`, without an index array."""

    device = "cpu"

    def empty(self, nbytes: int) -> Bytes:
        """Return a host buffer."""
        return np.empty(nbytes, np.uint8)

    def lay_out(self, verb: Verb, source: Bytes, out: Bytes) -> None:
        """Swap and interleave halves, shuffle rows, cut K blocks, group units."""
        x_MK = torch.from_numpy(source.reshape(verb.rows, verb.row_bytes))
        if verb.gated:
            gate, up = x_MK.chunk(2)
            x_MK = torch.stack((up, gate), dim=1).reshape(x_MK.shape)
        x_MK = x_MK.view(-1, 8, SHUFFLE_ROWS // 8, verb.row_bytes).transpose(1, 2)
        x_UMKB = x_MK.reshape(-1, verb.unit_rows, verb.row_bytes // K_BLOCK_BYTES, K_BLOCK_BYTES)
        torch.from_numpy(out).copy_(x_UMKB.transpose(1, 2).reshape(-1))

    def invert(self, verb: Verb, stored: Bytes, source: Bytes) -> None:
        """Undo each step in turn."""
        blocks = verb.row_bytes // K_BLOCK_BYTES
        x_UKMB = torch.from_numpy(stored).view(-1, blocks, verb.unit_rows, K_BLOCK_BYTES)
        x_MK = x_UKMB.transpose(1, 2).reshape(-1, SHUFFLE_ROWS // 8, 8, verb.row_bytes)
        x_MK = x_MK.transpose(1, 2).reshape(verb.rows, verb.row_bytes)
        if verb.gated:
            up, gate = x_MK[0::2], x_MK[1::2]
            x_MK = torch.cat((gate, up))
        torch.from_numpy(source).copy_(x_MK.reshape(source.shape))
