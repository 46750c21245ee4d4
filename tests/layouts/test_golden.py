"""The engine's own bytes, from the kernels directly, on every kernel set."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from moeconv.layouts import TRTLLM_BF16
from tests.golden import TRTLLM_BF16_RANKS, Rank, assemble


@pytest.mark.parametrize("rank", TRTLLM_BF16_RANKS, ids=str)
def test_engine_order_has_the_golden_digests(rank: Rank, fast_kernels):
    geometry = rank.case.geometry
    cut = TRTLLM_BF16.rank_slice(geometry, rank.tp, rank.rank)
    outputs = TRTLLM_BF16.outputs(geometry, cut)
    held = {output.param: hashlib.sha256() for output in outputs}
    for expert in rank.experts:
        matrices = rank.case.matrices(expert)
        for output in outputs:
            out = np.empty(output.spec.nbytes, np.uint8)
            fast_kernels.lay_out(output.verb, assemble(output, cut, matrices, "bf16"), out)
            held[output.param].update(out)

    assert {o.param: (len(rank.experts), *o.spec.shape) for o in outputs} == rank.shapes
    assert {param: digest.hexdigest() for param, digest in held.items()} == rank.sha256
