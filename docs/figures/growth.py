"""Measure how memory and time grow with the size of a checkpoint.

    python docs/figures/growth.py WORK FIGURES.json --layers 1 2 4 8 14

Experts in the shape of Qwen3-30B-A3B, 1.2 GB a layer. The source is sparse files, and a shard is
removed once it is durable, so that little disk is needed: bytes are read, laid out, digested,
written and synced all the same. A process a size, since a peak never falls.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import time
from pathlib import Path

from moeconv.bench.shapes import find_shape
from moeconv.checkpoint.index import open_checkpoint
from moeconv.conversion.budget import Limits
from moeconv.conversion.convert import convert
from moeconv.kernels import pick
from moeconv.layouts import TRTLLM_BF16
from moeconv.layouts.fingerprint import fingerprint
from moeconv.output.directory import OutputDirectory
from moeconv.output.manifest import Manifest
from moeconv.output.records import ShardRecord
from moeconv.planning.plan import Target, make_plan

SHAPE = find_shape("qwen3-30b-a3b")


def make(root: Path, layers: int) -> None:
    """Write a checkpoint of holes, a file a layer."""
    root.mkdir(parents=True)
    H, I = SHAPE.hidden, SHAPE.intermediate
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    for layer in range(layers):
        table, at = {}, 0
        for expert in range(SHAPE.experts):
            for name, shape in shapes.items():
                key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                offsets = [at, at + 2 * H * I]
                table[key] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
                at += 2 * H * I
        header = json.dumps(table).encode()
        with (root / f"model-{layer + 1:05}-of-{layers:05}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(file.tell() + at)
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": H,
        "moe_intermediate_size": I,
        "num_experts": SHAPE.experts,
        "num_hidden_layers": layers,
        "torch_dtype": "bfloat16",
    }
    (root / "config.json").write_text(json.dumps(config))


def run(source: Path, out: Path, layers: int, device: str, workers: int) -> dict[str, float]:
    """Convert some layers; return what the run says of itself."""
    kernels, checkpoint = pick(device), open_checkpoint(source)
    prints = fingerprint(TRTLLM_BF16, kernels)
    plan = make_plan(checkpoint, Target(TRTLLM_BF16, prints, layers=(0, layers - 1)), None)
    directory = OutputDirectory(out, plan.id, plan.identity)
    started = time.perf_counter()
    for event in convert(plan, checkpoint, directory, kernels, Limits(workers)):
        if isinstance(event, ShardRecord):
            (out / event.file).unlink()
        if isinstance(event, Manifest):
            peaks = event.run.peak_rss_bytes, event.run.peak_device_bytes
            seconds = round(time.perf_counter() - started, 2)
            return {"bytes": plan.nbytes, "seconds": seconds, "rss": peaks[0], "device": peaks[1]}
    message = "no manifest"
    raise AssertionError(message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4, 8, 14])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--one", type=int, help="Convert so many layers, in this process.")
    options = parser.parse_args()
    source = options.work / "source"
    if options.one:
        out = options.work / f"out-{options.one}"
        where = options.device, options.workers
        print(json.dumps(run(source, out, options.one, *where)))
        return
    make(source, max(options.layers))
    command = [sys.executable, __file__, str(options.work), "-", "--device", options.device]
    command += ["--workers", str(options.workers)]
    runs = [
        json.loads(subprocess.check_output([*command, "--one", str(layers)], text=True))
        for layers in options.layers
    ]
    figures = {"command": " ".join(["python", *sys.argv]), "runs": runs}
    options.figures.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
