"""The engines' own FP4 Marlin bytes, end to end: a checkpoint on disk, the command, each rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moeconv.errors import UnsupportedError
from moeconv.output.codec import read_manifest
from moeconv.serving import open_converted
from moeconv.serving.reader import stack_geometry
from tests import runs
from tests.golden_fp4 import FP4_RANKS, Fp4Case, Fp4Rank

Convert = Callable[..., Path]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Convert a golden case, once a module."""
    root = tmp_path_factory.mktemp("golden")

    def convert(case: Fp4Case, tp: int | None, *, reciprocal: bool = False) -> Path:
        source = root / f"{case.name}{'-ct' if reciprocal else ''}"
        if not source.exists():
            case.write(source, reciprocal=reciprocal)
        out = root / f"{source.name}-{tp or 'any'}"
        if not out.exists():
            made_for = ("--tp", f"{tp}") if tp else ()
            runs.invoke("marlin-fp4", *case.options(), source, "--out", out, *made_for)
            runs.invoke("verify", out, "--read-data", "--source", source)
        return out

    return convert


def digests(out: Path, rank: Fp4Rank) -> dict[str, str]:
    (tp, tp_rank), (ep, ep_rank) = rank.tp, rank.ep
    read = runs.rank_bytes(out, tp=tp, rank=tp_rank, ep=ep, ep_rank=ep_rank)
    return {param: hashlib.sha256(data).hexdigest() for (_, param), data in read.items()}


def expected(rank: Fp4Rank) -> dict[str, str]:
    return {param: out["sha256"] for param, out in rank.row["out"].items()}


def has_own_factor(rank: Fp4Rank, out: Path) -> bool:
    """Whether the rank's own factors are not those of the whole layer."""
    if rank.case.target != "marlin-nvfp4":
        return False
    own = (rank.row["scale_factor_w13"], rank.row["scale_factor_w2"])
    return own != read_manifest(out).facts[0].factors


@pytest.mark.parametrize("rank", FP4_RANKS, ids=str)
def test_a_rank_reads_the_golden_bytes(rank: Fp4Rank, converted: Convert):
    tp = rank.tp[0]
    out = converted(rank.case, None)
    with open_converted(out) as directory:
        geometry = stack_geometry(directory.manifest.stacks[0])
        reason = directory.layout.tp_refusal(geometry, tp)
        if reason:
            with pytest.raises(UnsupportedError, match=r"cannot serve TP"):
                directory.rank(tp_size=tp, tp_rank=0)
    if reason or (has_own_factor(rank, out) and rank.ep == (1, 0)):
        out = converted(rank.case, tp)
    wanted = expected(rank)
    if has_own_factor(rank, out) and rank.ep != (1, 0):
        # Bytes that depend on the EP size are not offered; weights are the same, and values are.
        wanted = {param: digest for param, digest in wanted.items() if "scale" not in param}
        assert wanted.items() <= digests(out, rank).items()
        return
    assert digests(out, rank) == wanted


@pytest.mark.parametrize("rank", FP4_RANKS, ids=str)
def test_shapes_and_dtypes_are_the_engine_s(rank: Fp4Rank, converted: Convert):
    dtypes = {
        "I32": "int32",
        "F32": "float32",
        "BF16": "bfloat16",
        "F16": "float16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E8M0": "float8_e8m0fnu",
    }
    with open_converted(converted(rank.case, rank.tp[0])) as directory:
        (tp, tp_rank), (ep, ep_rank) = rank.tp, rank.ep
        view = directory.rank(tp_size=tp, tp_rank=tp_rank, ep_size=ep, ep_rank=ep_rank)
        found = {
            tensor.param: (list(tensor.spec.shape), dtypes[tensor.spec.dtype])
            for tensor in view.tensors()
        }
    assert found == {p: (out["shape"], out["dtype"]) for p, out in rank.row["out"].items()}


@pytest.mark.parametrize("name", ["nvfp4-a", "nvfp4-small-scales", "nvfp4-fp16", "nvfp4-sglang"])
def test_compressed_tensors_give_the_same_bytes(name: str, converted: Convert):
    rank = next(rank for rank in FP4_RANKS if rank.case.name == name)
    modelopt = runs.rank_bytes(converted(rank.case, None))
    theirs = runs.rank_bytes(converted(rank.case, None, reciprocal=True))

    # 1 / (1 / x) is not x for every float32; the engine takes the same way.
    exact = {key: data for key, data in modelopt.items() if not key[1].endswith("scale_2")}
    assert exact.items() <= theirs.items()
    for key in set(modelopt) - set(exact):
        if "sglang" in name:
            bits = [np.frombuffer(read[key], np.uint16).astype(int) for read in (modelopt, theirs)]
            assert np.abs(bits[0] - bits[1]).max() <= 1
        else:
            scales = [np.frombuffer(read[key], np.float32) for read in (modelopt, theirs)]
            np.testing.assert_allclose(scales[0], scales[1], rtol=1e-6)
