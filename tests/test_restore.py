"""The original checkpoint comes back: every file of it, to the byte."""

from __future__ import annotations

import errno
import hashlib
import json
import signal
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from moeconv import report
from moeconv.checkpoint.index import open_checkpoint
from moeconv.conversion.pipeline import Moved
from moeconv.errors import MoeconvError, OutputError, UnsupportedError, VerifyError
from moeconv.kernels.cpu import CpuKernels
from moeconv.layouts import LAYOUTS
from moeconv.output.card import write_card
from moeconv.output.codec import read_manifest
from moeconv.restoration.restore import Restored, bytes_to_restore, restore
from tests import published, runs
from tests.fp4.models import KINDS, NVFP4_KINDS, Model
from tests.runs import Wanted
from tests.sources import Tiny, write_safetensors, write_tiny
from tests.test_crash import faulty

if TYPE_CHECKING:
    from tests.fp4.models import Array


def digests(root: Path) -> dict[str, str]:
    """SHA-256 of every file of a directory."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def restored(root: Path, out: Path, kernels: Any = None) -> dict[str, str]:
    """Restore, and return SHA-256 of every file."""
    *_, result = restore(root, kernels or CpuKernels(), out)
    assert isinstance(result, Restored)
    return digests(out)


@pytest.mark.parametrize("storage", ["per-expert", "stacked", "transposed", "plain"])
@pytest.mark.parametrize(
    "wanted", [Wanted(), Wanted(tp=2), Wanted(max_shard_bytes=90_000)], ids=str
)
@pytest.mark.parametrize("shards", [1, 3])
def test_bf16_comes_back(make_checkpoint, tmp_path, storage, wanted, shards):
    source = make_checkpoint(storage=storage, shards=shards, index=shards > 1)
    out = runs.run(source, tmp_path / "out", wanted)
    assert restored(out, tmp_path / "back") == digests(source)


FP4: dict[str, Any] = {"layers": 2, "experts": 3, "hidden": 128, "intermediate": 128}


def awkward(layer: int, expert: int, projection: str, scales: Array) -> None:
    """Scales that no layout gives back: subnormal, negative, NaN, negative zero."""
    if (layer, expert) != (0, 1):
        scales[0, :5] = 0x01, 0x81, 0xB8, 0x7F, 0x80


def back_from_fp4(model: Model, tmp_path: Path, *options: str) -> dict[str, Any]:
    """Convert, restore, compare; return what the manifest says of the sidecar."""
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    args = ("--device", "cpu", "--max-lost-scales", "100", *options)
    runs.invoke("marlin-fp4", source, "--out", out, *args)
    runs.invoke("verify", out, "--read-data", "--source", source, "--device", "cpu")
    runs.invoke("restore", out, "--out", tmp_path / "back", "--device", "cpu")
    assert digests(tmp_path / "back") == digests(source)
    return dict(json.loads((out / "moeconv.json").read_bytes())["restore"])


@pytest.mark.parametrize("tp", [(), ("--tp", "2")], ids=["any", "tp2"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fp4_comes_back(kind, tp, tmp_path):
    back_from_fp4(Model(kind, **FP4), tmp_path, *tp)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--tp", "2"),
        ("--engine", "sglang"),
        ("--serving-dtype", "float16"),
        ("--reconcile-scales",),
        ("--max-shard-size", "60kB"),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("kind", NVFP4_KINDS)
def test_scales_that_are_lost_come_back(kind, options, tmp_path):
    scales = {(0, 2, "up"): 1 / 384, (1, 0, "down"): 1 / 3, (1, 1, "gate"): 3.85e-5}
    model = Model(kind, **FP4, change_scales=awkward, scales=scales)
    back_from_fp4(model, tmp_path, *options)


def test_a_sidecar_holds_only_the_scales_that_are_lost(tmp_path):
    """Of 18 block-scale tensors all but one expert's three."""
    few = back_from_fp4(Model("modelopt", **FP4), tmp_path / "few")
    many = back_from_fp4(Model("modelopt", **FP4, change_scales=awkward), tmp_path / "many")
    assert many["nbytes"] - few["nbytes"] == 15 * 128 * 128 // 16


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_float_scales_come_back(dtype, tmp_path):
    """Powers of two by their exponents; where some are none, in the sidecar."""
    sizes = []
    for name, value in (("powers", 0x3F80), ("others", 0x3F81)):

        def change(tensors: dict[str, Any], value: int = value) -> None:
            for tensor, (_, shape, data) in tensors.items():
                if tensor.endswith("weight_scale"):
                    bits = np.frombuffer(data, np.uint8).astype(np.uint32) << 23
                    if ".1.up_proj" in tensor:
                        bits[0] = value << 16
                    raw = bits if dtype == "F32" else (bits >> 16).astype(np.uint16)
                    tensors[tensor] = (dtype, shape, raw.tobytes())

        source = Model("mxfp4", **FP4).write(tmp_path / name, change)
        out = tmp_path / f"{name}.out"
        runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu")
        assert restored(out, tmp_path / f"{name}.back") == digests(source)
        manifest = json.loads((out / "moeconv.json").read_bytes())
        sizes.append(manifest["restore"]["nbytes"])
    assert sizes[1] - sizes[0] == 2 * 128 * 4 * (4 if dtype == "F32" else 2)


@pytest.mark.parametrize("dtype", ["F4", "I8"])
def test_other_dtypes_of_packed_bytes_come_back(dtype, tmp_path):
    back_from_fp4(Model("mxfp4", **FP4, weight_dtype=dtype), tmp_path)


def test_what_a_writer_of_another_mind_wrote_comes_back(make_checkpoint, tmp_path):
    """Metadata, spaces, an order of its own, escapes, an index that spans lines, twins."""
    source = make_checkpoint(shards=2)
    for number, path in enumerate(sorted(source.glob("*.safetensors"))):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + size])
        items = sorted(table.items(), reverse=bool(number))
        items.insert(number, ("__metadata__", {"format": "pt", "note": "\u00e9\n" * 9}))
        text = json.dumps(dict(items), indent=3, ensure_ascii=bool(number)).encode() + b" " * 13
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()), indent=5) + "\n\n")
    (source / "sub").mkdir()
    (source / "sub" / "template.jinja").write_bytes(b"\x00\xff raw")
    out = runs.run(source, tmp_path / "out", Wanted(max_shard_bytes=90_000))
    assert restored(out, tmp_path / "back") == digests(source)


def test_a_tensor_that_two_shards_hold_comes_back_twice(make_checkpoint, tmp_path):
    source = make_checkpoint(shards=1, extra={"twin": ("U8", (5,), b"twins")})
    write_safetensors(source / "model-00000.safetensors", {"twin": ("U8", (5,), b"twins")}, pad=3)
    (source / "model.safetensors.index.json").unlink()
    out = runs.run(source, tmp_path / "out")
    assert restored(out, tmp_path / "back") == digests(source)


@pytest.mark.parametrize("kind", published.KINDS)
def test_what_transformers_wrote_comes_back(kind, tmp_path):
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        published.write(kind, tmp_path / kind, "150kB")
    out = runs.run(tmp_path / kind, tmp_path / "out")
    assert restored(out, tmp_path / "back") == digests(tmp_path / kind)


def test_each_kernel_set_restores(source, converted, tmp_path, kernels):
    assert restored(converted, tmp_path / "back", kernels) == digests(source)


WRITERS: dict[str, Any] = {
    "bf16": lambda root: write_tiny(root, Tiny(shards=3)),
    "modelopt-nvfp4": lambda root: Model("modelopt", **FP4).write(root),
    "ct-nvfp4": lambda root: Model("ct", **FP4).write(root),
    "mxfp4": lambda root: Model("mxfp4", **FP4).write(root),
    "mxfp4-float": lambda root: Model("mxfp4", **FP4).write(root, floats),
    "ct-mxfp4": lambda root: Model("ct-mxfp4", **FP4).write(root),
    "gptoss-mxfp4": lambda root: Model("gptoss", **FP4).write(root),
}
"""Who writes each scheme."""

PADDED = {"quantization_config": {"config_groups": {"0": {"input_activations": {"num_bits": 8}}}}}
"""What has compressed-tensors MXFP4 served by the engine's general method."""


def floats(tensors: dict[str, Any]) -> None:
    """Store block scales as the BF16 numbers that their exponents stand for."""
    for name, (_, shape, data) in tensors.items():
        if name.endswith("weight_scale"):
            bits = np.frombuffer(data, np.uint8).astype(np.uint16) << 7
            tensors[name] = ("BF16", shape, bits.tobytes())


def dressed(source: Path) -> Path:
    """Give a checkpoint what published ones have beside the tensors: tied heads, files, code."""
    path = max(source.glob("*.safetensors"))
    size = int.from_bytes(path.read_bytes()[:8], "little")
    table, data = json.loads(path.read_bytes()[8 : 8 + size]), path.read_bytes()[8 + size :]
    for name in ("model.embed_tokens.weight.tied", "lm_head.weight"):
        end = len(data)
        table[name] = {"dtype": "BF16", "shape": [3], "data_offsets": [end, end + 6]}
        data += b"shared"
    text = json.dumps({"__metadata__": {"format": "pt"}, **table}, indent=1).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    index = source / "model.safetensors.index.json"
    told = json.loads(index.read_bytes())
    told["weight_map"] |= dict.fromkeys(table, path.name)
    index.write_text(json.dumps(told, indent=2))
    for name, text in (
        ("README.md", b"---\nlicense: mit\n---\n"),
        ("LICENSE", b"free\r\n"),
        ("modeling_tiny.py", b"raise SystemExit\n"),
        ("tokenizer.model", bytes(range(256))),
        ("chat/template.jinja", "\u00fc".encode()),
        ("empty.txt", b""),
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(text)
    return source


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [(layout.id, scheme) for layout in LAYOUTS for scheme in layout.schemes],
)
def test_every_layout_of_every_scheme_comes_back(layout, scheme, tmp_path):
    """With several shards, tied heads and files of all kinds; with the sidecar's size as said."""
    source, out = dressed(WRITERS[scheme](tmp_path / "source")), tmp_path / "out"
    if (layout, scheme) == ("marlin-mxfp4", "ct-mxfp4"):
        config = source / "config.json"
        config.write_text(json.dumps(json.loads(config.read_bytes()) | PADDED))
    args = ("--layout", layout, "--out", out, "--device", "cpu")
    planned = runs.invoke("convert", source, *args, "--dry-run", "--json")
    (said,) = (json.loads(line) for line in planned.splitlines() if line.startswith("{"))
    made = runs.invoke("convert", source, *args, "--json")
    (done,) = (json.loads(line) for line in made.splitlines() if '"event": "done"' in line)
    manifest = read_manifest(out)
    assert (manifest.layout.id, {stack.scheme for stack in manifest.stacks}) == (layout, {scheme})
    assert manifest.restore
    assert said["sidecar_bytes"] == done["sidecar_bytes"] == manifest.restore.nbytes
    assert f"with {report.size(manifest.restore.nbytes)} more" in runs.invoke("inspect", out)
    card = write_card("org/tiny", manifest, "", ()).decode()
    assert f"{manifest.restore.nbytes:,} bytes in `restore/`" in card
    assert restored(out, tmp_path / "back") == digests(source)
    *_, again = restore(out, CpuKernels(), tmp_path / "back")
    assert isinstance(again, Restored)
    assert again.already, "every byte is in a digest"


# What cannot be restored, and where.


def test_without_a_sidecar_it_says_what_is_missing(tmp_path):
    source = Model("modelopt", **FP4).write(tmp_path / "source")
    out = tmp_path / "out"
    runs.invoke("marlin-fp4", source, "--out", out, "--device", "cpu", "--no-sidecar")
    assert not (out / "restore").exists()
    runs.invoke("verify", out, "--read-data", "--source", source, "--device", "cpu")
    assert "cannot be restored" in runs.invoke("inspect", out)
    assert b"cannot be had from these files" in write_card("org/tiny", read_manifest(out), "", ())
    with pytest.raises(UnsupportedError, match=r"--no-sidecar.*headers.*18 input_scale.*global"):
        restored(out, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_trial_is_no_source(source, tmp_path):
    out = runs.run(source, tmp_path / "out", Wanted(layers=(1, 1)))
    assert not (out / "restore").exists()
    with pytest.raises(UnsupportedError, match="it holds only layers 1-1"):
        restored(out, tmp_path / "back")


def test_with_and_without_a_sidecar_are_two_plans(source, converted):
    done = runs.moeconv(
        "trtllm", source, "--out", converted, "--max-shard-size", "1GB", "--no-sidecar"
    )
    assert done.returncode == 5
    assert "sidecar (yes there, no now)" in done.stderr


def test_a_directory_of_something_else_is_left_alone(converted, tmp_path):
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "mine").touch()
    for out, words in (
        (tmp_path / "back", "is not empty"),
        (converted / "back", "lies in the converted"),
        (converted, "lies in the converted"),
    ):
        before = digests(out) if out.exists() else {}
        with pytest.raises(OutputError, match=words):
            restored(converted, out)
        assert (digests(out) if out.exists() else {}) == before


def test_another_conversion_s_restore_is_left_alone(make_checkpoint, tmp_path):
    one, two = (make_checkpoint(name, seed=i) for i, name in enumerate(("one", "two")))
    first, second = (runs.run(it, tmp_path / f"{it.name}.out") for it in (one, two))
    steps = restore(first, CpuKernels(), tmp_path / "back")
    next(steps)
    del steps
    with pytest.raises(OutputError, match="another plan"):
        restored(second, tmp_path / "back")
    assert restored(first, tmp_path / "back") == digests(one)


@pytest.mark.parametrize("folder", ["experts", "weights", "restore"])
def test_a_damaged_byte_is_not_restored(source, converted, tmp_path, folder):
    (path, *_) = sorted((converted / folder).iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(VerifyError):
        restored(converted, tmp_path / "back")
    back = tmp_path / "back"
    whole = digests(source)
    assert all(whole[name] == digest for name, digest in digests(back).items() if name in whole)


def test_a_changed_config_is_no_source(converted, tmp_path):
    config = converted / "config.json"
    config.write_text(config.read_text().replace("}", ', "rope_theta": 1}'))
    with pytest.raises(VerifyError, match="config"):
        restored(converted, tmp_path / "back")


# Whatever stops it, the same command ends it right.


def fail_at_every_call(
    out: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Restore with a full disk at each call, then to the end; return how many calls there were."""
    whole = digests(source)
    with monkeypatch.context() as patch:
        calls = faulty(patch, lambda _: None)
        restored(out, tmp_path / "counted")
    assert calls["calls"] > 15
    for point in range(calls["calls"]):
        back = tmp_path / f"back{point}"

        def fail(number: int, point: int = point) -> None:
            if number == point:
                raise OSError(errno.ENOSPC, "No space left")

        with monkeypatch.context() as patch:
            faulty(patch, fail)
            with pytest.raises(OutputError):
                restored(out, back)
        found = {name: it for name, it in digests(back).items() if ".moeconv" not in name}
        assert found.items() <= whole.items(), point
        with pytest.raises(MoeconvError):
            open_checkpoint(back)
        assert restored(out, back) == whole, point
    return calls["calls"]


def test_every_write_fsync_and_rename(make_checkpoint, tmp_path, monkeypatch):
    source = make_checkpoint(experts=2, layers=1, hidden=64, intermediate=64)
    fail_at_every_call(runs.run(source, tmp_path / "out"), source, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_every_write_fsync_and_rename_of_each_layout(layout, tmp_path, monkeypatch, record):
    source = dressed(WRITERS[layout.schemes[0]](tmp_path / "source"))
    args = ("--layout", layout.id, "--device", "cpu", "--max-shard-size", "100kB")
    runs.invoke("convert", source, "--out", tmp_path / "out", *args)
    tried = fail_at_every_call(tmp_path / "out", source, tmp_path, monkeypatch)
    record(f"restore, a full disk at every call, {layout.id}", tried, "the source, to the byte")


def test_killed_in_the_middle(source, converted, tmp_path):
    args = ("restore", converted, "--out", tmp_path / "back")
    code, out, err = runs.driven("count", 0, *map(str, args[:-1]), tmp_path / "counted")
    assert code == 0, err
    code, _, err = runs.driven("kill", int(out.split()[-1]) // 2, *args)
    assert code == -signal.SIGKILL, err
    again = runs.moeconv(*args, "--json")
    assert again.returncode == 0, again.stderr
    assert digests(tmp_path / "back") == digests(source)


# What was restored before is read again, and held to the digests of the source.


def begun(converted: Path, back: Path) -> Path:
    """Restore until one weight file is whole; return that file."""
    steps = restore(converted, CpuKernels(), back)
    while not (files := sorted(back.glob("*.safetensors"))):
        next(steps)
    del steps
    return files[0]


def damage(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def restored_by_command(converted: Path, back: Path) -> tuple[dict[str, Any], str]:
    """Restore by the real command; return what it says to machines, and to people."""
    done = runs.moeconv("restore", converted, "--out", back, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = runs.json_lines(done.stdout)
    return line, " ".join(done.stderr.split())


def test_a_file_of_an_earlier_run_is_read_again(source, converted, tmp_path):
    begun(converted, tmp_path / "back")
    line, said = restored_by_command(converted, tmp_path / "back")
    assert digests(tmp_path / "back") == digests(source)
    assert (line["resumed"], line["redone"], line["already"]) == (1, [], False)
    assert not said


@pytest.mark.parametrize("at", [3, 20, 1000, -1], ids=["length", "header", "data", "end"])
def test_a_damaged_file_of_an_earlier_run_is_written_again(source, converted, tmp_path, at):
    file = begun(converted, tmp_path / "back")
    damage(file, at)
    *_, result = restore(converted, CpuKernels(), tmp_path / "back")
    assert isinstance(result, Restored)
    assert digests(tmp_path / "back") == digests(source)
    assert (result.resumed, result.redone) == (0, (file.name,))


def test_the_command_says_which_file_was_damaged(converted, tmp_path):
    file = begun(converted, tmp_path / "back")
    damage(file)
    line, said = restored_by_command(converted, tmp_path / "back")
    assert (line["resumed"], line["redone"]) == (0, [file.name])
    assert f"`{file.name}` of an earlier run was damaged" in said


def test_what_a_restore_moves_is_what_it_said(converted, tmp_path):
    file = begun(converted, tmp_path / "back")
    damage(file)
    moved = sum(
        event.nbytes
        for event in restore(converted, CpuKernels(), tmp_path / "back")
        if isinstance(event, Moved)
    )
    assert 0.9 * bytes_to_restore(read_manifest(converted)) < moved
    assert moved <= bytes_to_restore(read_manifest(converted))


def test_a_finished_restore_says_so_and_writes_nothing(source, converted, tmp_path):
    back = tmp_path / "back"
    restored(converted, back)
    before = {path: path.stat().st_mtime_ns for path in [back, *back.rglob("*")]}
    line, _ = restored_by_command(converted, back)
    assert line["already"]
    assert line["resumed"] == line["files"]
    said = runs.invoke("restore", converted, "--out", back, "--device", "cpu")
    assert "is already restored: byte for byte what was converted" in " ".join(said.split())
    assert {path: path.stat().st_mtime_ns for path in [back, *back.rglob("*")]} == before


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "tokenizer.json"])
def test_a_finished_restore_that_was_damaged_is_named_and_left_alone(converted, tmp_path, name):
    back = tmp_path / "back"
    restored(converted, back)
    damage(back / name)
    before = digests(back)
    with pytest.raises(VerifyError, match=rf"`{name}` in `.*back` is not what was converted"):
        restored(converted, back)
    assert digests(back) == before


@pytest.mark.parametrize("name", ["mine.txt", "sub/mine.bin", "model-3.safetensors"])
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_file_of_somebody_else_among_restored_ones_is_named(
    converted, tmp_path, name, is_finished
):
    back = tmp_path / "back"
    if is_finished:
        restored(converted, back)
    else:
        begun(converted, back)
    (back / name).parent.mkdir(exist_ok=True)
    (back / name).write_bytes(b"mine")
    before = digests(back)
    with pytest.raises(OutputError, match=rf"holds `{name}`, which is not of the checkpoint"):
        restored(converted, back)
    assert digests(back) == before


def test_the_source_itself_is_already_restored(source, converted):
    """Whoever names it by mistake loses nothing."""
    before = digests(source)
    *_, result = restore(converted, CpuKernels(), source)
    assert isinstance(result, Restored)
    assert result.already
    assert digests(source) == before
