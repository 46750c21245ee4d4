"""How does an engine take it?

from moeconv.serving import open_converted

rank = open_converted("./converted").rank(tp_size=2, tp_rank=0)
for tensor in rank.tensors():
    out = torch.empty(tensor.nbytes, dtype=torch.uint8)
    rank.read_into(tensor, out.numpy())
"""

from __future__ import annotations

from moeconv.serving.reader import ConvertedDirectory, Rank, RankTensor, open_converted

__all__ = ["ConvertedDirectory", "Rank", "RankTensor", "open_converted"]
