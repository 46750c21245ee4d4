"""Measure whole conversions against `cp -r`, and against plain copies through a GPU.

    python docs/figures/pipeline.py make CHECKPOINT --layers 7 [--fp4]
    python docs/figures/pipeline.py time CHECKPOINT WORK FIGURES.json --ways cp cpu-2 cpu-2-bare

Ways, alternating in one run: `cp`; `plain-T` (read, to the GPU, back, write; pinned, T threads);
`cpu-W` and `cuda-W` (moeconv with W workers); the same with `-bare` (no digests). Each ends when
the bytes are on disk.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue

import numpy as np

EXPERTS, HIDDEN, INTERMEDIATE = 128, 2048, 768
PIECE_BYTES = 1 << 24
ORDER = {"F32": 0, "BF16": 1, "F8_E4M3": 2, "U8": 3}
BARE = """
import sys, types
from moeconv.conversion import pipeline, reading
from moeconv.output import shard
nothing = types.SimpleNamespace(update=lambda data: None, hexdigest=lambda: "0" * 64)
shard.hashlib = types.SimpleNamespace(sha256=lambda data: nothing)
pipeline.xxh3_each = reading.xxh3_each = lambda tables: ["0" * 32] * sum(map(len, tables))
from moeconv.cli import main
main()
"""
"""The command without digests of tensors and files."""


def make(root: Path, layers: int, *, is_fp4: bool) -> None:
    """Write a checkpoint of random experts in the shape of Qwen3-30B-A3B, a file a layer."""
    root.mkdir(parents=True, exist_ok=True)
    files = [f"model-{layer + 1:05}-of-{layers:05}.safetensors" for layer in range(layers)]
    pool = np.random.default_rng(0).integers(0, 256, 1 << 26, np.uint8)
    with ThreadPoolExecutor() as threads:
        made = threads.map(
            lambda layer: make_layer(root / files[layer], layer, pool, is_fp4=is_fp4),
            range(layers),
        )
        weight_map = {name: file for names, file in zip(made, files, strict=True) for name in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (root / "config.json").write_text(json.dumps(config))


def make_layer(path: Path, layer: int, pool: np.ndarray, *, is_fp4: bool) -> list[str]:
    """Write the experts of one layer and return their names."""
    shapes = dict.fromkeys(("gate_proj", "up_proj"), (INTERMEDIATE, HIDDEN))
    shapes["down_proj"] = (HIDDEN, INTERMEDIATE)
    table, parts, at = {}, [], 0
    rng = np.random.default_rng(layer)
    tensors = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight{suffix}", dtype, shape, nbytes)
        for expert in range(EXPERTS)
        for name, (rows, cols) in shapes.items()
        for suffix, dtype, shape, nbytes in stored(rows, cols, is_fp4=is_fp4)
    ]
    # As the library writes them: the widest elements first, then by name.
    for name, dtype, shape, nbytes in sorted(tensors, key=lambda each: (ORDER[each[1]], each[0])):
        begin = int(rng.integers(0, pool.size - nbytes))
        data = pool[begin : begin + nbytes]
        if dtype == "F8_E4M3":
            data = np.clip(data & 127, 8, 126)
        if dtype == "F32":
            data = np.full(1, 0.001, np.float32).view(np.uint8)
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        parts.append(data)
        at += nbytes
    header = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.writelines(parts)
    return list(table)


def stored(rows: int, cols: int, *, is_fp4: bool) -> Iterator[tuple[str, str, list[int], int]]:
    """Yield suffix, dtype, shape and bytes of what one matrix is stored as."""
    if not is_fp4:
        yield "", "BF16", [rows, cols], 2 * rows * cols
        return
    yield "", "U8", [rows, cols // 2], rows * cols // 2
    yield "_scale", "F8_E4M3", [rows, cols // 16], rows * cols // 16
    yield "_scale_2", "F32", [], 4


def weights(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


def set_cache(root: Path, *, is_cold: bool) -> None:
    """Drop the files from the page cache, or read them into it."""
    for path in weights(root):
        with path.open("rb", buffering=0) as file:
            if is_cold:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass


def sync(root: Path) -> None:
    for path in weights(root):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def plain(source: Path, out: Path, threads: int) -> None:
    """Move every byte of the files through the GPU and to new files."""
    import torch

    pieces: SimpleQueue[tuple[int, int, int, int] | None] = SimpleQueue()
    out.mkdir()
    fds = []
    for path in weights(source):
        pair = os.open(path, os.O_RDONLY), os.open(out / path.name, os.O_CREAT | os.O_RDWR)
        fds.append(pair)
        size = path.stat().st_size
        os.ftruncate(pair[1], size)
        for at in range(0, size, PIECE_BYTES):
            pieces.put((*pair, at, min(PIECE_BYTES, size - at)))
    for _ in range(threads):
        pieces.put(None)

    def work() -> None:
        up, down = (torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in "ab")
        there = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda")
        stream = torch.cuda.Stream()
        while (piece := pieces.get()) is not None:
            read, write, at, size = piece
            os.preadv(read, [memoryview(up.numpy())[:size]], at)
            with torch.cuda.stream(stream):
                there[:size].copy_(up[:size], non_blocking=True)
                down[:size].copy_(there[:size], non_blocking=True)
            stream.synchronize()
            os.pwrite(write, memoryview(down.numpy())[:size], at)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for read, write in fds:
        os.fsync(write)
        os.close(read)
        os.close(write)


def run(way: str, source: Path, out: Path) -> dict[str, float]:
    """Do it one way into an empty place; return seconds, and what moeconv says of its own run."""
    kind, _, rest = way.partition("-")
    shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    if kind == "cp":
        subprocess.run(
            [shutil.which("cp") or "cp", "-r", "--reflink=never", source, out], check=True
        )
        sync(out)
    elif kind == "plain":
        plain(source, out, int(rest))
    else:
        workers, _, bare = rest.partition("-")
        program = ["-c", BARE] if bare else ["-m", "moeconv"]
        verb = "marlin-fp4" if "_scale" in next(iter_names(source)) else "trtllm"
        options = ["--out", str(out), "--device", kind, "--workers", workers, "--json"]
        command = [sys.executable, *program, verb, str(source), *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        said = json.loads(done.stdout.splitlines()[-1])
        names = ("seconds", "peak_rss_bytes", "peak_device_bytes", "bytes_written")
        return {"wall_s": time.perf_counter() - started, **{name: said[name] for name in names}}
    return {"wall_s": time.perf_counter() - started}


def iter_names(source: Path) -> Iterator[str]:
    """Yield the names of weights, those with scales first."""
    index = json.loads((source / "model.safetensors.index.json").read_text())
    yield from sorted(index["weight_map"], key=lambda name: "_scale" not in name)


def machine() -> dict[str, object]:
    """Say what this ran on."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    cpu = next(line.split(":")[1].strip() for line in info.splitlines() if "model name" in line)
    gpu = shutil.which("nvidia-smi")
    query = [gpu or "", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE,
        "kernel": platform.release(),
        "gpu": subprocess.check_output(query, text=True).strip() if gpu else None,
    }


def measure(options: argparse.Namespace) -> None:
    """Time each way in turn, several times."""
    source, out = options.source, options.work / "out"
    found: dict[str, list[dict[str, float]]] = {}
    for way in options.ways * options.repeats:
        set_cache(source, is_cold=options.cold)
        found.setdefault(way, []).append(run(way, source, out))
        print(way, found[way][-1], flush=True)
        shutil.rmtree(out)
    options.figures.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "source_bytes": sum(path.stat().st_size for path in weights(source)),
        "runs": found,
        "median_wall_s": {
            name: statistics.median(each["wall_s"] for each in runs) for name, runs in found.items()
        },
    }
    options.figures.write_text(json.dumps(figures, indent=1) + "\n")
    print(figures["median_wall_s"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    maker = verbs.add_parser("make")
    maker.add_argument("source", type=Path)
    maker.add_argument("--layers", type=int, default=7)
    maker.add_argument("--fp4", action="store_true")
    timer = verbs.add_parser("time")
    timer.add_argument("source", type=Path)
    timer.add_argument("work", type=Path)
    timer.add_argument("figures", type=Path)
    timer.add_argument("--ways", nargs="+", required=True)
    timer.add_argument("--repeats", type=int, default=3)
    timer.add_argument("--cold", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    if arguments.verb == "make":
        make(arguments.source, arguments.layers, is_fp4=arguments.fp4)
    else:
        arguments.work.mkdir(parents=True, exist_ok=True)
        measure(arguments)
