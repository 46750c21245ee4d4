"""Headers: sound ones read as `safe_open` reads them, broken ones are a `SourceError`."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open

from moeconv.checkpoint.header import read_header
from moeconv.errors import SourceError
from moeconv.tensors import BITS, TensorSpec
from tests.sources import noise, write_raw, write_safetensors

NAME = "model.safetensors"
PLAIN = {"a": ("BF16", (2, 3), bytes(range(12))), "b": ("U8", (4,), b"wxyz")}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


names = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20
).filter(lambda name: name != "__metadata__")
specs = st.builds(
    TensorSpec,
    st.sampled_from(sorted(BITS)),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
).filter(lambda spec: spec.bits % 8 == 0)


@given(specs=st.dictionaries(names, specs, max_size=6), pad=st.integers(0, 9))
def test_a_sound_header_reads_as_safe_open_reads_it(folder, specs, pad):
    tensors = {
        name: (spec.dtype, spec.shape, noise(name, spec.nbytes)) for name, spec in specs.items()
    }
    write_safetensors(folder / NAME, tensors, pad=pad)

    file, refs = read_header(folder, NAME)

    raw = (folder / NAME).read_bytes()
    assert file.size == len(raw)
    assert {ref.name: ref.spec for ref in refs} == specs
    for ref in refs:
        assert raw[ref.begin : ref.begin + ref.spec.nbytes] == tensors[ref.name][2]
    with safe_open(folder / NAME, framework="numpy") as oracle:
        assert set(oracle.keys()) == set(specs)
        for name, spec in specs.items():
            assert tuple(oracle.get_slice(name).get_shape()) == spec.shape
            assert oracle.get_slice(name).get_dtype() == spec.dtype


def reads_or_refuses(folder: Path) -> None:
    """Either our parser and the library's agree that it is sound, or it is a `SourceError`."""
    try:
        _, refs = read_header(folder, NAME)
    except SourceError:
        return
    with safe_open(folder / NAME, framework="numpy") as oracle:
        assert {ref.name for ref in refs} == set(oracle.keys())


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
entries = json_values | st.fixed_dictionaries(
    {
        "dtype": json_values | st.sampled_from(["BF16", "U8", "F4"]),
        "shape": json_values | st.lists(st.integers(-2, 4) | json_values, max_size=3),
        "data_offsets": json_values
        | st.lists(st.integers(-4, 20) | json_values, min_size=2, max_size=2),
    }
)


@given(header=json_values | st.dictionaries(st.text(max_size=3), entries, max_size=3))
@example(header={"a": {"dtype": "U8", "shape": [float("inf")], "data_offsets": [0, 1]}})
@example(header={"a": {"dtype": "U8", "shape": [10**400], "data_offsets": [0, 10**400]}})
def test_no_json_header_is_a_traceback(folder, header):
    write_raw(folder / NAME, json.dumps(header).encode(), bytes(16))
    reads_or_refuses(folder)


@given(cut=st.integers(0, 200), at=st.integers(0, 200), byte=st.integers(0, 255))
def test_no_damage_is_a_traceback(folder, cut, at, byte):
    write_safetensors(folder / NAME, PLAIN)
    raw = bytearray((folder / NAME).read_bytes())
    raw[at % len(raw)] = byte
    (folder / NAME).write_bytes(raw[: len(raw) - cut % len(raw)])
    reads_or_refuses(folder)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        pytest.param(b"", "no safetensors header", id="empty"),
        pytest.param(b"\x10\0\0\0", "no safetensors header", id="short-length"),
        pytest.param(struct.pack("<Q", 1 << 60) + b"{}", "no safetensors header", id="huge"),
        pytest.param(
            struct.pack("<Q", 2) + b"[]", "cannot be read as safetensors|broken header", id="list"
        ),
        pytest.param(struct.pack("<Q", 2) + b"\xff\xff", "broken header", id="no-utf8"),
        pytest.param(
            struct.pack("<Q", 200_000) + b"[" * 200_000, "broken header", id="nested-too-deep"
        ),
    ],
)
def test_what_is_no_header_is_said(folder, raw, words):
    (folder / NAME).write_bytes(raw)
    with pytest.raises(SourceError, match=words):
        read_header(folder, NAME)


def test_a_name_given_twice_is_refused(folder):
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    header = '{"a":' + entry % (0, 1) + ',"a":' + entry % (1, 2) + "}"
    write_raw(folder / NAME, header.encode(), b"xy")
    with pytest.raises(SourceError, match="'a' twice"):
        read_header(folder, NAME)


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_a_file_cut_short_is_refused(folder, cut):
    write_safetensors(folder / NAME, PLAIN, cut=cut)
    with pytest.raises(SourceError, match=r"shorter than its header says.*`b` ends past the file"):
        read_header(folder, NAME)


def test_bytes_after_the_last_tensor_are_refused(folder):
    write_safetensors(folder / NAME, PLAIN)
    with (folder / NAME).open("ab") as file:
        file.write(b"more")
    with pytest.raises(SourceError):
        read_header(folder, NAME)


def test_a_missing_file_is_a_source_error(folder):
    with pytest.raises(SourceError, match=r"`none\.safetensors` is not in"):
        read_header(folder, "none.safetensors")


def test_other_bytes_have_another_identity(folder):
    size = 300_000
    probes = set()
    for at in (None, 0, size // 2, size - 1):
        data = bytearray(size)
        if at is not None:
            data[at] = 1
        write_safetensors(folder / NAME, {"a": ("U8", (size,), bytes(data))})
        probes.add(read_header(folder, NAME)[0].probe_xxh3)
    assert len(probes) == 4
