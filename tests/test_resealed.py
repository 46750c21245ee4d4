"""A manifest that somebody changed and sealed anew: an error in words, or the truth."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeconv.errors import MoeconvError
from moeconv.kernels.cpu import CpuKernels
from moeconv.output.codec import decode, encode_sealed
from moeconv.output.manifest import Manifest
from moeconv.restoration.restore import restore
from moeconv.verification.digests import Subset
from moeconv.verification.verify import verify
from tests import runs
from tests.fp4.models import Model

Json: TypeAlias = Any
Way: TypeAlias = tuple[str | int, ...]

NUMBERS = (0, -1, 1, 2**31, 2**62, -(2**40))
TEXTS = ("", "x", "../x", "a" * 300, "BF16", "U8", "0-9")


@dataclass(frozen=True)
class Made:
    """A checkpoint, its conversion, and what the manifest says."""

    source: Path
    out: Path
    manifest: dict[str, Json]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A small NVFP4 model: its manifest has every kind of entry."""
    root = tmp_path_factory.mktemp("resealed")
    source, out = root / "source", root / "out"
    Model("modelopt", experts=2, hidden=64, intermediate=64, layers=1).write(source)
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
    return Made(source, out, json.loads((out / "moeconv.json").read_bytes()))


def ways(value: Json, way: Way = ()) -> Iterator[Way]:
    """Yield where each value within a value is."""
    yield way
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from ways(value[key], (*way, key))


def another(value: Json, chance: random.Random) -> Json:
    """Return another value of the same kind, most likely one that does not fit."""
    others: tuple[Json, ...]
    match value:
        case bool():
            others = (not value,)
        case int():
            others = (*NUMBERS, value + 1, value - 1)
        case float():
            others = (0.0, -1.0, 1e300, 2 * value)
        case str():
            others = (*TEXTS, value[:-1], f"{value}x")
        case list():
            others = ([], value + value, value[:-1], value[::-1])
        case dict():
            others = (dict(list(value.items())[1:]),)
        case _:
            others = ("x", 0)
    return chance.choice(others)


def changed(manifest: dict[str, Json], chance: random.Random) -> bytes | None:
    """Change one value and seal; `None` where the result is no manifest at all."""
    manifest = json.loads(json.dumps(manifest))
    key = chance.choice(sorted(manifest.keys() - {"digest", "run_digest"}))
    *way, last = (key, *chance.choice(list(ways(manifest[key]))))
    holder: Json = manifest
    for step in way:
        holder = holder[step]
    holder[last] = another(holder[last], chance)
    try:
        return encode_sealed(decode(json.dumps(manifest).encode(), Manifest, "moeconv.json"))
    except MoeconvError:
        return None


def read(made: Made, data: bytes) -> None:
    """Verify and restore by a manifest: errors are in words, and what comes back is the source."""
    (made.out / "moeconv.json").write_bytes(data)
    with contextlib.suppress(MoeconvError):
        list(verify(made.out, CpuKernels(), read_data=Subset()))
    with contextlib.suppress(MoeconvError):
        list(verify(made.out, CpuKernels(), source=made.source))
    back = made.out.parent / "back"
    with contextlib.suppress(MoeconvError):
        list(restore(made.out, CpuKernels(), back))
        assert runs.tree(back) == runs.tree(made.source)
    shutil.rmtree(back, ignore_errors=True)


@given(chance=st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_what_somebody_sealed_is_no_traceback(made: Made, chance: random.Random) -> None:
    data = changed(made.manifest, chance)
    if data is not None:
        read(made, data)


@pytest.mark.slow
def test_nothing_of_many_is_a_traceback(
    made: Made, record: Callable[[str, int, str], None]
) -> None:
    chance, tried = random.Random(1), 0
    while tried < 2000:
        data = changed(made.manifest, chance)
        if data is not None:
            read(made, data)
            tried += 1
    record("a manifest changed and sealed anew", tried, "an error in words, or the source back")


@pytest.mark.parametrize(
    ("key", "text"), [("max shard size", "5GB"), ("layers", "few"), ("max shard size", "")]
)
def test_a_plan_that_gives_no_number_is_named(made: Made, key: str, text: str) -> None:
    plan = {**made.manifest["plan"], key: text}
    data = json.dumps({**made.manifest, "plan": plan}).encode()
    (made.out / "moeconv.json").write_bytes(encode_sealed(decode(data, Manifest, "")))
    with pytest.raises(MoeconvError, match=f"plan gives `{key}` as"):
        list(restore(made.out, CpuKernels(), made.out.parent / "back"))
