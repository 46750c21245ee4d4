"""Any part of any tensor is what numpy's slicing says."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.checkpoint.header import read_header
from moeconv.checkpoint.local import LocalRanges
from moeconv.checkpoint.reader import Reader, Rows, scratch_bytes
from moeconv.checkpoint.types import Part, TensorRef
from moeconv.errors import SourceError
from moeconv.ranges.openfiles import fill_loop
from moeconv.tensors import BITS
from tests.sources import noise, write_safetensors

NAME = "model.safetensors"


def _reader(folder: Path) -> Reader:
    return Reader(LocalRanges(folder))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def only_ref(folder: Path, dtype: str, shape: tuple[int, ...]) -> tuple[TensorRef, np.ndarray]:
    """Write one tensor, unaligned, and return it as void items too."""
    item = BITS[dtype] // 8
    data = noise("x", int(np.prod(shape)) * item)
    write_safetensors(folder / NAME, {"pad": ("U8", (1,), b"-"), "x": (dtype, shape, data)})
    _, refs = read_header(folder, NAME)
    return refs[1], np.frombuffer(data, f"V{item}").reshape(shape)


def ranges(size: int) -> st.SearchStrategy[range]:
    return st.builds(
        lambda first, length, step: range(first, min(first + length, size), step),
        st.integers(0, size - 1),
        st.integers(1, size),
        st.integers(1, 3),
    )


@given(data=st.data())
def test_any_part_is_a_numpy_slice(folder, data):
    dtype = data.draw(st.sampled_from(["U8", "BF16", "F32", "F64", "F8_E4M3"]))
    inner = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=2))
    experts = data.draw(st.none() | st.integers(1, 3))
    shape = (*(() if experts is None else (experts,)), *inner)
    ref, array = only_ref(folder, dtype, shape)
    expert = None if experts is None else data.draw(st.integers(0, experts - 1))
    matrix = (array if expert is None else array[expert]).reshape(inner[0], -1)
    rows, cols = (data.draw(ranges(size)) for size in matrix.shape)
    part = Part(ref, expert, rows, cols, data.draw(st.booleans()))

    expected = matrix[rows.start : rows.stop : rows.step, cols.start : cols.stop : cols.step]
    expected = expected.T if part.transposed else expected
    assert part.shape == expected.shape
    gap = data.draw(st.integers(0, 2)) * part.item_bytes
    row_bytes = expected.shape[1] * part.item_bytes
    wide = np.full((expected.shape[0], row_bytes + gap), 0xA5, np.uint8)
    scratch = np.empty(scratch_bytes(part, row_bytes + gap), np.uint8)
    with _reader(folder) as reader:
        raw = reader.read_part(part, wide[:, :row_bytes], scratch)

    assert wide[:, :row_bytes].tobytes() == expected.tobytes()
    assert (wide[:, row_bytes:] == 0xA5).all(), "wrote past a row's end"
    begin, end = part.span
    assert raw.tobytes() == array.tobytes()[begin:end]


@given(begin=st.integers(0, 999), size=st.integers(0, 999))
def test_any_range_of_bytes(folder, begin, size):
    ref, array = only_ref(folder, "U8", (2000,))
    out = np.empty(size, np.uint8)
    with _reader(folder) as reader:
        reader.read(ref, begin, out)
        assert reader.bytes_read == size
    assert out.tobytes() == array.tobytes()[begin : begin + size]


def test_a_file_that_ends_early_is_a_source_error(folder):
    ref, _ = only_ref(folder, "U8", (2000,))
    path = folder / NAME
    path.write_bytes(path.read_bytes()[:-1])
    with _reader(folder) as reader, pytest.raises(SourceError, match="ended inside `x`"):
        reader.read(ref, 0, np.empty(2000, np.uint8))


@pytest.fixture(params=["numba", "without"])
def loops(request, monkeypatch) -> Iterator[str]:
    """Many reads in one compiled call, and one by one where numba is not installed."""
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "moeconv.ranges.readloop", None)
    fill_loop.cache_clear()
    fill_loop()  # few bytes are not worth loading it
    yield request.param
    fill_loop.cache_clear()


def test_many_reads_are_as_many_single_ones(tmp_path, loops):
    tensors = {f"{i:03}": ("U8", (size,), noise(str(i), size)) for i, size in enumerate(range(99))}
    for name in ("a.safetensors", "b.safetensors"):
        write_safetensors(tmp_path / name, tensors)
    refs = [ref for name in "ab" for ref in read_header(tmp_path, f"{name}.safetensors")[1]]
    outs = [np.full(ref.spec.nbytes, 0xA5, np.uint8) for ref in refs]
    with _reader(tmp_path) as reader:
        reader.read_rows([Rows((r,), (0,), out[None]) for r, out in zip(refs, outs, strict=True)])
        assert [out.tobytes() for out in outs] == [tensors[ref.name][2] for ref in refs]
        assert reader.bytes_read == sum(out.nbytes for out in outs)
    assert (fill_loop() is not None) == (loops == "numba")


@given(
    files=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    gap=st.integers(0, 2),
)
def test_rows_of_several_tables_and_files(tmp_path_factory, files, sizes, gap):
    root = tmp_path_factory.getbasetemp() / "rows"
    root.mkdir(exist_ok=True)
    data = [noise(f"rows {n}", 400) for n in range(3)]
    for n, some in enumerate(data):
        write_safetensors(root / f"{n}.safetensors", {"x": ("U8", (400,), some)})
    refs = [read_header(root, f"{n}.safetensors")[1][0] for n in range(3)]
    begins = [[(7 * i + 31 * j) % 300 for i in range(len(files))] for j in range(len(sizes))]
    outs = [np.full((len(files), size + gap), 0xA5, np.uint8) for size in sizes]
    with _reader(root) as reader:
        reader.read_rows(
            [
                Rows([refs[n] for n in files], starts, out[:, :size])
                for starts, out, size in zip(begins, outs, sizes, strict=True)
            ]
        )
    for starts, out, size in zip(begins, outs, sizes, strict=True):
        for n, begin, row in zip(files, starts, out, strict=True):
            assert row.tobytes() == data[n][begin : begin + size] + b"\xa5" * gap


def test_a_file_that_ends_inside_many_reads_is_said_of_the_tensor(folder, loops):
    ref, _ = only_ref(folder, "U8", (1000,))
    os.truncate(folder / NAME, ref.begin + 555)
    out = np.empty(1000, np.uint8)
    with _reader(folder) as reader, pytest.raises(SourceError, match=r"`x`: expected 100 bytes"):
        reader.read_rows([Rows([ref] * 10, range(0, 1000, 100), out.reshape(10, 100))])
    assert loops in {"numba", "without"}


def test_a_file_that_is_gone_is_a_source_error(folder):
    ref, _ = only_ref(folder, "U8", (10,))
    (folder / NAME).unlink()
    with _reader(folder) as reader, pytest.raises(SourceError, match=r"cannot be read at `x`"):
        reader.read(ref, 0, np.empty(10, np.uint8))


def test_more_files_than_a_process_may_open(tmp_path):
    names = [f"{i}.safetensors" for i in range(200)]
    for name in names:
        write_safetensors(tmp_path / name, {"x": ("U8", (4,), name[:4].encode())})
    refs = [read_header(tmp_path, name)[1][0] for name in names]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 40, before[1]))
    try:
        with Reader(LocalRanges(tmp_path)) as reader, ThreadPoolExecutor(8) as pool:

            def read(ref: TensorRef) -> bytes:
                out = np.empty(4, np.uint8)
                reader.read(ref, 0, out)
                return out.tobytes()

            assert list(pool.map(read, refs * 3)) == [name[:4].encode() for name in names] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def write_to(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")


def replace(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("change", [write_to, replace])
def test_a_file_that_changes_while_it_is_read_is_a_source_error(folder, change):
    ref, _ = only_ref(folder, "U8", (2000,))
    with Reader(LocalRanges(folder)) as reader:
        reader.read(ref, 0, np.empty(2000, np.uint8))
        change(folder / NAME)
        out = np.empty(2000, np.uint8)
        with pytest.raises(SourceError, match="changed while it was read"):
            reader.read(ref, 0, out)
        with pytest.raises(SourceError, match="changed while it was read"):
            reader.read_rows([Rows([ref] * 20, range(0, 2000, 100), out.reshape(20, 100))])
