"""Whatever is changed, missing or added is found and named."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeconv.conversion.pipeline import Moved
from moeconv.errors import SourceError, VerifyError
from moeconv.kernels.cpu import CpuKernels
from moeconv.output.codec import read_manifest
from moeconv.output.contents import by_file
from moeconv.output.files import Files
from moeconv.output.manifest import TensorEntry
from moeconv.verification.digests import Subset, check_digests
from moeconv.verification.verify import Verified, bytes_to_move, verify
from tests import runs
from tests.fp4.models import Model
from tests.runs import Wanted
from tests.sources import Tiny, write_tiny

STORAGES = ("per-expert", "stacked", "transposed", "plain")


def verified(root: Path, **options: Any) -> Verified:
    *moved, result = verify(root, CpuKernels(), **options)
    assert isinstance(result, Verified)
    assert all(isinstance(event, Moved) for event in moved)
    return result


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "wanted", [Wanted(), Wanted(tp=2), Wanted(max_shard_bytes=90_000)], ids=str
)
def test_a_conversion_is_true_to_its_source(make_checkpoint, tmp_path, storage, wanted):
    source = make_checkpoint(storage=storage)
    out = runs.run(source, tmp_path / "out", wanted)
    result = verified(out, read_data=Subset(), source=source)
    manifest = read_manifest(out)
    assert result.files == len(manifest.files)
    assert manifest.restore
    entries = [*manifest.entries()]
    assert result.tensors == len(entries)
    assert len(entries) == len(manifest.tensors) + len(manifest.weights) + len(
        manifest.restore.kept
    )
    experts = sum(len(tensor.xxh3) for tensor in manifest.tensors)
    assert result.digests == len(manifest.files) + experts + len(entries) - len(manifest.tensors)
    assert result.sources == len(runs.plan(source)[1].tensors)


def test_each_kernel_set_inverts(source, converted, fast_kernels):
    *_, result = verify(converted, fast_kernels, source=source)
    assert isinstance(result, Verified)
    assert result.sources


def test_what_it_moves_is_what_it_said(source, converted):
    manifest = read_manifest(converted)
    moved = sum(
        event.nbytes
        for event in verify(converted, CpuKernels(), read_data=Subset(), source=source)
        if isinstance(event, Moved)
    )
    total = bytes_to_move(manifest, read_data=Subset(), source=True)
    assert 0.9 * total < moved <= total


def test_a_partial_conversion_is_verified_against_its_part(source, tmp_path):
    out = runs.run(source, tmp_path / "out", Wanted(layers=(1, 1)))
    assert verified(out, read_data=Subset(), source=source).sources


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("experts/*layers.1*", r"expert 3 of `.*w2_weight.* is damaged"), ("weights/*", "is damaged")],
)
def test_one_bit_is_found(source, converted, pattern, words):
    (path,) = converted.glob(pattern)
    flip(path, -1)
    verified(converted)  # the structure is still right
    with pytest.raises(VerifyError, match=words):
        verified(converted, read_data=Subset())
    with pytest.raises(VerifyError, match=r"does not give back|differs from the source"):
        verified(converted, source=source)


def test_a_bit_in_a_side_file_is_found(converted):
    flip(converted / "tokenizer.json", 0)
    with pytest.raises(VerifyError, match=r"`tokenizer\.json` is damaged"):
        verified(converted)


def test_a_bit_of_the_header_is_found(converted):
    (path,) = converted.glob("weights/*")
    flip(path, 8 + 30)
    with pytest.raises(VerifyError):
        verified(converted, read_data=Subset())


def test_padding_of_a_header_counts(converted):
    (path,) = converted.glob("weights/*")
    data = bytearray(path.read_bytes())
    assert data[4095:4096] == b" "
    data[4095:4096] = b"\n"
    path.write_bytes(data)
    with pytest.raises(VerifyError, match="has a changed header"):
        verified(converted)


@pytest.mark.parametrize("name", ["config.json", "experts", "weights"])
def test_what_is_missing_is_named(converted, name):
    path = converted / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(VerifyError, match=rf"`{name}.*` is missing"):
        verified(converted)


def test_a_short_file_is_named(converted):
    (path,) = converted.glob("weights/*")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(VerifyError, match=r"`weights/.*` has \d+ bytes, expected"):
        verified(converted)


@pytest.mark.parametrize("name", ["model.safetensors", "experts/more.safetensors"])
def test_a_shard_too_many_is_named(converted, name):
    (path,) = converted.glob("weights/*")
    shutil.copy(path, converted / name)
    with pytest.raises(VerifyError, match=f"`{name}` is not in"):
        verified(converted)


def test_shards_that_changed_places_are_found(converted):
    one, two = sorted(converted.glob("experts/*"))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    with pytest.raises(VerifyError, match=r"is not as `moeconv\.json` says"):
        verified(converted)


def test_another_source_is_found(make_checkpoint, tmp_path):
    out = runs.run(make_checkpoint("one"), tmp_path / "out")
    with pytest.raises(VerifyError, match="expert 0, row 0, byte 0"):
        verified(out, source=make_checkpoint("two", seed=1))
    with pytest.raises(VerifyError, match="is not what was converted"):
        verified(out, source=make_checkpoint("three", layers=2, experts=2))


def test_one_changed_byte_of_the_source_is_found_where_it_is(source, converted):
    _, checkpoint = runs.plan(source)
    ref = checkpoint.tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    flip(source / ref.file, ref.begin + 5 * 256 + 7)
    with pytest.raises(VerifyError, match=r"experts\.2\.up_proj.*: expert 2, row 5, byte 7"):
        verified(converted, source=source)


def test_what_is_not_converted_is_a_source_error(source, tmp_path):
    with pytest.raises(SourceError, match="not in"):
        verified(source)


def test_parts_of_the_digests_are_all_of_them_together(source, converted):
    whole = verified(converted, read_data=Subset())
    parts = [verified(converted, read_data=Subset(part, 3)).digests for part in (1, 2, 3)]
    assert sum(parts) == whole.digests - whole.files
    assert max(parts) - min(parts) <= 1


class Reads(Files):
    """The files of a directory; notes which ranges were read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ranges: list[tuple[str, int, int]] = []

    def read(self, file: str, begin: int, out: Any) -> None:
        self.ranges.append((file, begin, begin + out.nbytes))
        super().read(file, begin, out)


@given(parts=st.integers(1, 40), width=st.integers(1, 3))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_parts_together_read_every_byte_of_data_once(converted, parts, width):
    manifest = read_manifest(converted)
    read, equal = [], 0
    for part in range(1, parts + 1):
        with Reads(converted) as files:
            events = check_digests(files, manifest, Subset(part, parts), width=width)
            equal += sum(event.digests for event in events)
            read += files.ranges
    assert len(read) == len({*read}), "no range twice"
    shards = by_file(manifest)
    for entry in manifest.files:
        at = min((it.begin for it in shards.get(entry.path, ())), default=0) if parts > 1 else 0
        for _, begin, end in sorted(it for it in read if it[0] == entry.path):
            assert begin == at
            at = end
        assert at == (entry.size if entry.path in shards or parts == 1 else 0)
    experts = sum(len(it.xxh3) for it in manifest.tensors)
    others = sum(not isinstance(it, TensorEntry) for it in manifest.entries())
    assert equal == experts + others + (len(manifest.files) if parts == 1 else 0)


def test_one_bit_is_in_one_part(converted):
    path = next(converted.glob("experts/*layers.1*"))
    flip(path, -1)
    found = []
    for part in (1, 2, 3):
        try:
            verified(converted, read_data=Subset(part, 3))
        except VerifyError:
            found.append(part)
    assert len(found) == 1


def test_a_damaged_sidecar_is_found(converted):
    (path,) = converted.glob("restore/*")
    flip(path, -1)
    with pytest.raises(VerifyError, match=r"`model.safetensors.index.json:0-\d+` .* is damaged"):
        verified(converted, read_data=Subset())


def test_two_experts_exchanged_are_found(converted):
    path = next(converted.glob("experts/*layers.1*"))
    entry = next(t for t in read_manifest(converted).tensors if t.prefix.endswith(".1.mlp.experts"))
    size = (entry.end - entry.begin) // 4
    data = bytearray(path.read_bytes())
    one, two = (slice(entry.begin + i * size, entry.begin + (i + 1) * size) for i in (1, 2))
    data[one], data[two] = data[two], data[one]
    path.write_bytes(data)
    with pytest.raises(VerifyError, match=r"expert 1 of `.*w13_weight"):
        verified(converted, read_data=Subset())


def test_a_manifest_edited_by_hand_is_named(converted):
    path = converted / "moeconv.json"
    path.write_text(path.read_text().replace('"intermediate": 128', '"intermediate": 64', 1))
    with pytest.raises(VerifyError, match=r"`moeconv\.json` was changed after the conversion"):
        verified(converted)


def test_a_manifest_from_another_directory_is_named(make_checkpoint, tmp_path):
    """Of two models of one shape, without reading data."""
    one, two = (
        runs.run(make_checkpoint(name, seed=seed), tmp_path / f"{name}.out")
        for seed, name in enumerate(("one", "two"))
    )
    shutil.copy(two / "moeconv.json", one / "moeconv.json")
    with pytest.raises(VerifyError, match="is of another conversion"):
        verified(one)


@pytest.mark.parametrize("kind", ["bf16", "nvfp4"])
def test_nothing_of_it_needs_torch(tmp_path, kind):
    """Also where torch is installed, it is not imported; what only it can check is said."""
    source, out = tmp_path / "source", tmp_path / "out"
    if kind == "bf16":
        write_tiny(source, Tiny(layers=1))
    else:
        Model("modelopt", layers=1, experts=2, hidden=64, intermediate=64).write(source)
    verb = {"bf16": "trtllm", "nvfp4": "marlin-fp4"}[kind]
    runs.invoke(verb, source, "--out", out, "--device", "cpu")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['flashinfer'] = None; "
        "sys.argv[0] = 'moeconv'; from moeconv.cli import main; main()"
    )
    for args, words in (
        (("--read-data", "--source", source), r"sample +\d+ tensors? not checked by others"),
        (("--read-data",), r"digests +\d+ equal"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, "verify", out, *args],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert re.search(words, done.stderr)


def test_all_data_and_a_part_of_it_contradict_each_other(tmp_path):
    done = runs.moeconv("verify", tmp_path, "--read-data", "--read-data-subset", "1/3")
    assert done.returncode == 2
    assert "--read-data-subset" in done.stderr
