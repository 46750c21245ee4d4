"""The tables of the page on performance, in its order, from the recorded figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from moeconv.bench.shapes import SHAPES, Shape

FIGURES: Final = Path(__file__).resolve().parent / "figures"

_NAMES: Final = {
    "qwen3-30b-a3b": ("Qwen3-30B-A3B", 48),
    "qwen3-235b-a22b": ("Qwen3-235B-A22B", 94),
    "gpt-oss-120b": ("gpt-oss-120b", 36),
    "deepseek-v3": ("DeepSeek-V3", 58),
    "kimi-k2": ("Kimi-K2", 60),
}
"""What a shape is called, and its layers with experts."""

_HALF_A_BYTE: Final = {"NVFP4": 1.6875, "MXFP4": 1.59375}
"""Bytes of three matrices and their scales over H·I: a scale for each 16 or 32 values."""


_MINUTE_S: Final = 60
_FEW_S: Final = 5
"""Below it, two digits tell more than whole seconds."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def performance_tables() -> list[str]:
    """Return what stands between each pair of marks on the page."""
    return [_kernels(), _beside_cp(), _on_the_gpu(), _stages(), _growth(), _floors(), _processes()]


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIGURES / name).read_text(encoding="utf-8"))
    return found


def _kernels() -> str:
    figures = _read("kernels-h200.json")
    header = (
        *("layer", "GB", "copy", "Triton", "engine’s order", "inverse", "torch", "vLLM"),
        *("of copy", "to vLLM"),
    )
    versions = ", ".join(f"{name} {number}" for name, number in figures["versions"].items())
    source = (
        f"\n{figures['gpu']}, {versions}; {figures['date']}: `{figures['command']}`. "
        f"The column of vLLM is {figures['vllm']}.\n"
    )
    return table(header, map(_layer, figures["rows"])) + source


def _layer(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a layer's rates in GB/s, ours over a copy's and over the engine's."""
    rates = row["gb_per_s"]
    ours, copy, engine = rates["triton"], rates["copy"], rates.get("vllm")
    ways = ("copy", "triton", "triton engine order", "triton inverse", "torch")
    return (
        f"{row['shape']}, {row['part']}",
        f"{row['nbytes'] / 1e9:.2f}",
        *(f"{rates[way]:.0f}" for way in ways),
        f"{engine:.0f}" if engine else "",
        f"{ours / copy:.0%}",
        f"{rates['triton engine order'] / engine:.1f} ×" if engine else "",
    )


def _beside_cp() -> str:
    figures = _read("pipeline-2-cores.json")
    names = {"bf16": "TRTLLM BF16", "nvfp4": "Marlin NVFP4"}

    def rows() -> Iterator[tuple[str, ...]]:
        for what, run in figures["runs"].items():
            kind, cache = what.split()
            cp, ours, bare = (median(run["wall_s"][way]) for way in ("cp", "cpu-2", "cpu-2-bare"))
            size = f"{run['source_bytes'] / 1e9:.2f}"
            times = (f"{cp:.1f}", f"{ours:.1f}", f"{ours / cp:.2f}", f"{bare:.1f}")
            yield f"{names[kind]}, {cache}", size, *times

    header = ("", "GB", "cp, s", "moeconv, s", "of cp", "no digests, s")
    machine = figures["machine"]
    source = f"\n{machine['cpu']}, {machine['cores']} cores, {figures['date']}: "
    return (
        table(header, rows())
        + source
        + f"`{figures['command']}` (`docs/figures/pipeline-2-cores.json`).\n"
    )


def _on_the_gpu() -> str:
    figures = _read("pipeline-h200.json")
    ways = ("cp", "plain-16", "cuda-8", "cuda-8-bare", "cpu-8", "cpu-8-bare")

    def rows() -> Iterator[tuple[str, ...]]:
        for row in figures["rows"]:
            found = {way: median(seconds) for way, seconds in row["seconds"].items()}
            shown = (f"{found[way]:.2f}" if way in found else "" for way in ways)
            of_plain = f"{found['plain-16'] / found['cuda-8']:.0%}"
            yield f"{row['what']}, {row['source_bytes'] / 1e9:.2f} GB", *shown, of_plain

    header = ("s", "cp", "plain", "`cuda`", "no digests", "`cpu`", "no digests", "`cuda` of plain")
    machine = figures["machine"]
    return table(header, rows()) + (
        f"\n{machine['cpu']}, {machine['cores']} cores, {machine['gpu']}, {figures['date']}; "
        "all runs and what else was tried: `docs/figures/pipeline-h200.json`.\n"
    )


_STAGES: Final = {
    "read_rows": "reading many ranges in one call",
    "count_bytes": "counting scales, in the survey",
    "ShardWriter.init": "allocating the files",
    "_work": "workers, all they do to a piece",
    "read_matrices": "… reading it, with digests of the source",
    "lay_out": "… up, kernel, down, with waiting for a station",
    "write": "… writing it",
    "digest": "SHA-256 of the files",
    "complete": "the manifest",
    "seal": "sealing",
}
"""What is worth showing of a run's timeline."""


def _stages() -> str:
    figures = _read("pipeline-h200.json")["timeline NVFP4 2.04 GB"]
    found = {stage["stage"]: stage for stage in figures["stages"]}
    rows = (
        (
            words,
            str(found[name]["calls"]),
            *(f"{found[name][key]:.2f}" for key in ("wall_s", "cpu_s", "from_s", "to_s")),
        )
        for name, words in _STAGES.items()
    )
    return table(("stage", "calls", "s of all threads", "on a core", "from", "to"), rows)


def _growth() -> str:
    figures = _read("growth-2-cores.json")
    rows = (
        (
            f"{run['bytes'] / 1e9:.1f}",
            f"{run['rss'] / 1e6:.1f} MB",
            f"{run['seconds']:.1f}",
            f"{run['seconds'] / run['bytes'] * 1e9:.1f}",
        )
        for run in figures["runs"]
    )
    source = f"\n{figures['date']}: `{figures['command']}` (`docs/figures/growth-2-cores.json`).\n"
    return table(("GB", "peak memory", "s", "s a GB"), rows) + source


def _floors() -> str:
    rates = {
        "a disk at 1 GB/s": 1e9,
        "a disk at 5 GB/s": 5e9,
        "a link at 55 GB/s": 55e9,
        "memory at 4.2 TB/s": 2.1e12,
    }

    def rows() -> Iterator[tuple[str, ...]]:
        for shape in SHAPES:
            name, layers = _NAMES[shape.name]
            fp4 = "MXFP4" if shape.name == "gpt-oss-120b" else "NVFP4"
            kinds = {"BF16": 6.0, fp4: _HALF_A_BYTE[fp4]}
            for kind, each in kinds.items():
                if (shape.name, kind) != ("gpt-oss-120b", "BF16"):
                    yield f"{name}, {kind}", *_times(shape, layers, each, rates.values())

    return table(("experts of", "an expert", "a layer", "all layers", *rates), rows())


def _times(shape: Shape, layers: int, each: float, rates: Iterable[float]) -> Iterator[str]:
    expert = each * shape.hidden * shape.intermediate
    layer = shape.experts * expert
    yield f"{expert / 1e6:.1f} MB"
    yield f"{layer / 1e9:.2f} GB"
    yield f"{layers * layer / 1e9:.0f} GB"
    yield from (_duration(layers * layer / rate) for rate in rates)


def _duration(seconds: float) -> str:
    if seconds >= _MINUTE_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds:.0f} s" if seconds >= _FEW_S else f"{seconds:.2g} s"


def _processes() -> str:
    figures = _read("processes-h200.json")
    first: dict[tuple[str, str], float] = {}

    def rows() -> Iterator[tuple[str, ...]]:
        for row in figures["rows"]:
            alone = first.setdefault((row["what"], row["device"]), row["seconds"])
            yield (
                row["what"],
                f"`{row['device']}`",
                str(row["processes"]),
                f"{row['wall_s']:.1f}",
                f"{row['seconds']:.2f}",
                f"{alone / row['seconds']:.2f} ×",
                f"{row['peak_rss_bytes'] / 1e9:.2f} GB",
            )

    header = ("", "device", "processes", "all of it, s", "conversion, s", "to one", "memory of one")
    return table(header, rows())
