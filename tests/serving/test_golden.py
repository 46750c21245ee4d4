"""The engine's own bytes, end to end: a checkpoint on disk, the command, what each rank reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from moeconv.errors import UnsupportedError
from moeconv.layouts import TRTLLM_BF16
from moeconv.serving import open_converted
from tests import runs
from tests.golden import TRTLLM_BF16_RANKS, Case, Rank
from tests.sources import Tiny, write_checkpoint


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, int | None], Path]:
    """Convert a golden case, once a module."""
    root = tmp_path_factory.mktemp("golden")

    def convert(case: Case, tp: int | None) -> Path:
        sizes = case.geometry
        tiny = Tiny(
            experts=sizes.experts,
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            layers=1,
            storage="per-expert" if sizes.gated else "plain",
        )
        source = root / case.name
        if not source.exists():
            tensors = {**tiny.tensors(), **case.tensors(tiny.prefix(0))}
            write_checkpoint(source, tensors, tiny.model_config(), shards=2)
        out = root / f"{case.name}-{tp or 'any'}"
        if not out.exists():
            done = runs.moeconv("trtllm", source, "--out", out, *(("--tp", f"{tp}") if tp else ()))
            assert done.returncode == 0, done.stderr
        return out

    return convert


@pytest.mark.parametrize("rank", TRTLLM_BF16_RANKS, ids=str)
def test_a_rank_reads_the_golden_bytes(rank: Rank, converted):
    out = converted(rank.case, None)
    if TRTLLM_BF16.tp_refusal(rank.case.geometry, rank.tp):
        with open_converted(out) as directory, pytest.raises(UnsupportedError) as refusal:
            directory.rank(tp_size=rank.tp, tp_rank=rank.rank)
        assert f"`moeconv trtllm {rank.case.name} --tp {rank.tp}`" in str(refusal.value.hint)
        out = converted(rank.case, rank.tp)

    read = runs.rank_bytes(out, tp=rank.tp, rank=rank.rank, ep=rank.ep, ep_rank=rank.ep_rank)

    digests = {param: hashlib.sha256(data).hexdigest() for (_, param), data in read.items()}
    assert digests == rank.sha256


def test_some_ranks_need_a_file_of_their_own():
    refused = {
        (rank.case.name, rank.tp)
        for rank in TRTLLM_BF16_RANKS
        if TRTLLM_BF16.tp_refusal(rank.case.geometry, rank.tp)
    }
    assert refused == {("qwen3-30b-a3b-mini", 8), ("deepseek-v2-lite-mini", 4)}
