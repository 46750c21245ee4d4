"""How does an engine take it?

from moeconv.serving import open_converted

rank = open_converted("./converted").rank(tp_size=2, tp_rank=0)
outs = [torch.empty(tensor.nbytes, dtype=torch.uint8, device="cuda") for tensor in rank.tensors()]
rank.read_all(zip(rank.tensors(), outs))
"""

from __future__ import annotations

from moeconv.serving.rank import Rank, RankTensor
from moeconv.serving.reader import ConvertedDirectory, open_converted

open = open_converted  # noqa: A001  (`moeconv.serving.open`, as a program says it)

__all__ = ["ConvertedDirectory", "Rank", "RankTensor", "open", "open_converted"]
