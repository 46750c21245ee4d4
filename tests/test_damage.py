"""Whatever bit of a converted directory or of its source is another one is named."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.errors import VerifyError
from moeconv.kernels.cpu import CpuKernels
from moeconv.output.codec import read_manifest
from moeconv.serving import open_converted
from moeconv.verification.digests import Subset
from moeconv.verification.verify import Verified, verify
from tests import runs
from tests.fp4.models import Model
from tests.sources import Tiny, noise, write_tiny

SMALL: dict[str, Any] = {"layers": 1, "experts": 2, "hidden": 64, "intermediate": 64}
CODE = b"print('hello')\n"


@dataclass(frozen=True)
class Pair:
    """A checkpoint and its conversion."""

    source: Path
    out: Path


@pytest.fixture(scope="module", params=["bf16", "nvfp4"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A checkpoint with code, and what it is converted to; whoever changes a bit mends it."""
    root = tmp_path_factory.mktemp(request.param)
    source, out = root / "source", root / "out"
    if request.param == "bf16":
        extra = {name: ("U8", (256,), noise(name, 256)) for name in ("a.one", "a.two")}
        write_tiny(source, Tiny(**SMALL, extra=extra))
    else:
        Model("modelopt", **SMALL, scales={(0, 1, "down"): 1 / 384}).write(source)
    (source / "modeling.py").write_bytes(CODE)
    (source / "LICENSE").write_text("free, without limits")
    verb = {"bf16": "trtllm", "nvfp4": "marlin-fp4"}[request.param]
    runs.invoke(verb, source, "--out", out, "--device", "cpu")
    return Pair(source, out)


def verified(out: Path, **options: Any) -> Verified:
    *_, result = verify(out, CpuKernels(), **options)
    assert isinstance(result, Verified)
    return result


@contextmanager
def changed(path: Path, data: bytes) -> Iterator[None]:
    """Give a file other bytes, or make it, while the block runs."""
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(data)
    try:
        yield
    finally:
        path.unlink() if before is None else path.write_bytes(before)


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def names_at(out: Path, file: str, at: int) -> set[str]:
    """Return what may be named for a byte: its tensor, in data or header; else nothing more."""
    entries = [entry for entry in read_manifest(out).entries() if entry.file == file]
    held = {entry.name for entry in entries if entry.begin <= at < entry.end}
    text = (out / file).read_bytes()[: min((entry.begin for entry in entries), default=0)]
    starts = sorted((text.index(json.dumps(entry.name).encode()), entry.name) for entry in entries)
    before = [name for start, name in starts if start <= at < len(text.rstrip(b" "))]
    return held or {*before[-1:]}


def check_bit(out: Path, file: str, at: int, bit: int) -> None:
    """Change one bit; it is named with its file, and with its tensor where it is one's."""
    path = out / file
    expected = {file, *(names_at(out, file, at) if path.suffix == ".safetensors" else ())}
    with changed(path, flipped(path.read_bytes(), at, bit)), pytest.raises(VerifyError) as found:
        verified(out, read_data=Subset())
    assert all(f"`{name}`" in str(found.value) for name in expected), str(found.value)


def files_of(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


@given(data=st.data())
def test_every_bit_of_every_file_is_named(pair: Pair, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(files_of(pair.out)))
    size = (pair.out / file).stat().st_size
    sizes = [size, 4096] if file.endswith(".safetensors") else [size]  # headers as often as data
    at = data.draw(st.sampled_from(sizes).flatmap(lambda most: st.integers(0, most - 1)))
    check_bit(pair.out, file, at, data.draw(st.integers(0, 7)))


@pytest.mark.slow
def test_many_bits_are_named(pair: Pair, record: Callable[[str, int, str], None]) -> None:
    """As many of each file, and of each header."""
    chance, tried = random.Random(0), 0
    for file in files_of(pair.out):
        size = (pair.out / file).stat().st_size
        for most in {size, min(size, 4096)}:
            for _ in range(300):
                check_bit(pair.out, file, chance.randrange(most), chance.randrange(8))
                tried += 1
    kind = read_manifest(pair.out).layout.id
    record(f"one bit of a converted directory, {kind}", tried, "named, with its file and tensor")


@given(data=st.data())
def test_a_rank_that_checks_names_the_expert_and_its_tensor(
    pair: Pair, data: st.DataObject
) -> None:
    """The rank that holds it, before its memory is touched; the other reads its own."""
    entry = data.draw(st.sampled_from(read_manifest(pair.out).tensors))
    at = data.draw(st.integers(entry.begin, entry.end - 1))
    expert = entry.first + (at - entry.begin) * len(entry.xxh3) // (entry.end - entry.begin)
    path = pair.out / entry.file
    damaged = flipped(path.read_bytes(), at, data.draw(st.integers(0, 7)))
    with changed(path, damaged), open_converted(pair.out) as directory:
        for number in range(2):
            rank = directory.rank(ep_size=2, ep_rank=number)
            outs = [(it, np.full(it.nbytes, 0xA5, np.uint8)) for it in rank.tensors()]
            if number != expert:
                rank.read_all(outs, check=True)
                continue
            words = rf"expert {expert} of `{entry.name}` in `{entry.file}` is damaged"
            with pytest.raises(VerifyError, match=words):
                rank.read_all(outs, check=True)
            assert all((out == 0xA5).all() for _, out in outs)


def alike(out: Path) -> tuple[Any, Any]:
    """Return two tensors of one shard that have the same size, in the order of the file."""
    entries = sorted(read_manifest(out).entries(), key=lambda it: (it.file, it.begin))
    return next(
        (one, other)
        for number, one in enumerate(entries)
        for other in entries[number + 1 :]
        if (one.file, one.end - one.begin) == (other.file, other.end - other.begin)
    )


def test_two_tensors_that_changed_places_are_named(pair: Pair) -> None:
    """Their bytes alone, and their ranges too: then the file is sound in itself."""
    one, other = alike(pair.out)
    path = pair.out / one.file
    data = bytearray(path.read_bytes())
    first, second = slice(one.begin, one.end), slice(other.begin, other.end)
    assert data[first] != data[second]
    data[first], data[second] = data[second], data[first]
    with changed(path, bytes(data)):
        verified(pair.out)
        with pytest.raises(VerifyError, match=rf"`{one.name}` in `{one.file}` is damaged"):
            verified(pair.out, read_data=Subset())
        with pytest.raises(VerifyError, match=f"`{one.name}`"):
            verified(pair.out, source=pair.source)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    ranges = [header[it.name]["data_offsets"] for it in (other, one)]
    header[one.name]["data_offsets"], header[other.name]["data_offsets"] = ranges
    text = json.dumps(header, separators=(",", ":")).encode()
    data[8 : 8 + size] = text + b" " * (size - len(text))
    words = rf"`{one.name}` in `{one.file}` is not as `moeconv\.json` says: header, byte \d+"
    with changed(path, bytes(data)), pytest.raises(VerifyError, match=words):
        verified(pair.out)


@pytest.mark.parametrize(
    "name",
    ["more.py", "generation_config.json", "sub/chat.jinja", "x.safetensors.index.json", "x.bin"],
)
def test_a_file_too_many_that_an_engine_may_read_is_named(pair: Pair, name: str) -> None:
    (pair.out / name).parent.mkdir(exist_ok=True)
    with (
        changed(pair.out / name, CODE),
        pytest.raises(VerifyError, match=rf"`{name}` is not in `moeconv\.json`"),
    ):
        verified(pair.out)


def test_another_file_too_many_is_told(pair: Pair) -> None:
    assert not verified(pair.out).others
    with changed(pair.out / "notes.txt", b"mine"), changed(pair.out / "README.md", b"a card"):
        assert verified(pair.out).others == ("notes.txt",)
        said = " ".join(runs.invoke("verify", pair.out).split())
        assert "holds a file that moeconv did not write: `notes.txt`" in said


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "modeling.py", "LICENSE"])
def test_a_small_file_of_the_source_that_changed_is_named(pair: Pair, name: str) -> None:
    """By one bit that leaves it readable: it is as large as before."""
    sound = (pair.source / name).read_bytes()
    damaged = sound.replace(b"i", b"I", 1)
    with changed(pair.source / name, damaged):
        verified(pair.out, read_data=Subset())
        with pytest.raises(VerifyError, match=rf"not what was converted: `{name}` has SHA-256"):
            verified(pair.out, source=pair.source)
    with (
        changed(pair.out / name, damaged),
        pytest.raises(VerifyError, match=rf"`{name}` is damaged: expected SHA-256"),
    ):
        verified(pair.out)


@pytest.mark.parametrize("change", [(b" ", b"\n"), (b"{", b"{ ")], ids=["bit", "longer"])
def test_an_index_of_the_source_that_was_edited_is_named(
    pair: Pair, change: tuple[bytes, bytes]
) -> None:
    index = pair.source / "model.safetensors.index.json"
    edited = index.read_bytes().replace(*change, 1)
    with changed(index, edited), pytest.raises(VerifyError, match=rf"`{index.name}:0-\d+`"):
        verified(pair.out, source=pair.source)


def test_files_that_came_and_went_in_the_source_are_named(pair: Pair, tmp_path: Path) -> None:
    with (
        changed(pair.source / "more.py", CODE),
        pytest.raises(VerifyError, match=r"`more\.py` was not there"),
    ):
        verified(pair.out, source=pair.source)
    copy = shutil.copytree(pair.source, tmp_path / "copy")
    (copy / "LICENSE").unlink()
    with pytest.raises(VerifyError, match="`LICENSE` is missing"):
        verified(pair.out, source=copy)


@pytest.mark.parametrize("options", [(), ("--no-sidecar",)], ids=["sidecar", "none"])
def test_a_header_of_the_source_that_changed_is_named(
    source: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """A space, a word of the metadata: no tensor is another one."""
    out = tmp_path / "out"
    runs.invoke("trtllm", source, "--out", out, "--device", "cpu", *options)
    path = min(source.glob("*.safetensors"))
    sound = path.read_bytes()
    header = sound[8 : 8 + int.from_bytes(sound[:8], "little")]
    with (
        changed(path, sound.replace(header, header.replace(b", ", b",\n"))),
        pytest.raises(VerifyError, match=rf"`{path.name}` has another header"),
    ):
        verified(out, source=source)


def test_a_manifest_of_another_model_of_the_same_sizes_is_named(pair: Pair, tmp_path: Path) -> None:
    config = json.loads((pair.source / "config.json").read_bytes())
    other = shutil.copytree(pair.source, tmp_path / "other")
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 7}))
    layout = read_manifest(pair.out).layout.id
    runs.invoke("convert", other, "--layout", layout, "--out", tmp_path / "out", "--device", "cpu")
    theirs = (tmp_path / "out" / "moeconv.json").read_bytes()
    with changed(pair.out / "moeconv.json", theirs), pytest.raises(VerifyError):
        verified(pair.out)
    shutil.copy(tmp_path / "out" / "config.json", tmp_path / "config.json")
    with (
        changed(pair.out / "config.json", (tmp_path / "config.json").read_bytes()),
        changed(pair.out / "moeconv.json", theirs),
        pytest.raises(VerifyError, match=r"`experts/.*` .*is of another conversion.*metadata"),
    ):
        verified(pair.out)
