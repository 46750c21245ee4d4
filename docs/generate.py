"""Make the generated pages and drawings, or check that they are current.

Usage: `python docs/generate.py` writes what differs; with `--check` it only says what differs, and
exits with 1 if anything does.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import msgspec
from drawings import DRAWINGS
from tables import performance_tables, table

import moeconv
from moeconv.families import FAMILIES
from moeconv.families.family import Family
from moeconv.inspection.inspected import Inspection
from moeconv.layouts import LAYOUTS
from moeconv.layouts.layout import Engine, Geometry, Layout
from moeconv.output.manifest import FORMAT, Manifest
from moeconv.output.names import MANIFEST_NAME
from moeconv.planning.acceptance import ROWS, answers, make_command
from moeconv.planning.traits import Kind, model_of
from moeconv.schemes import SCHEMES

DOCS: Final = Path(__file__).resolve().parent
if DOCS.parent not in Path(moeconv.__file__).resolve().parents:
    sys.exit(
        f"moeconv is installed from {moeconv.__file__}, not from this checkout: install it first"
    )
NOTE: Final = "<!-- Made by docs/generate.py; edit the code it describes, not this page. -->\n"

MANIFEST_TEXT: Final = f"""\
Manifest and index of a converted directory, in JSON; the format is {FORMAT}. It is written last: a
directory without it is no model. A reader accepts fields that it does not know.

The same as JSON Schema: [manifest.schema.json](manifest.schema.json).
"""

SUPPORT_TEXT: Final = """\
# What is supported

Family, scheme and layout are independent of each other: any family whose experts are stored in a
scheme that a layout takes can be converted.

## Layouts

The engine versions are those whose own code the layout follows.
"""

FAMILIES_TEXT: Final = """\
## Families

The family is found by `model_type` in `config.json`; `--family` overrides it.
"""

TAKES_TEXT: Final = """\
## Which engine takes which family

By the defaults of each family: a config may say otherwise, and `moeconv inspect` reads it. A number
leads to a note. A model that no engine takes in a layout is refused; what one engine does not take
is warned of.
"""

ROWS_TEXT: Final = """\
## What engines do not take

The table that `inspect`, `--dry-run` and conversions go by. Names in italics stand for what the
model has.
"""

TABLE_MARK: Final = "<!-- The table is made by docs/generate.py. -->"

COMMON_FIELDS: Final = {
    "backend": "The engine's option that selects the kernel.",
    "begin": "First byte: an offset in `file` or, for a digest, in the source tensor.",
    "bytes_read": "Source bytes read by the process that sealed the directory.",
    "bytes_written": "Bytes of tensors written by that process.",
    "device": "What laid the experts out, as `cpu` or `cuda:0`.",
    "kernels": "What moved the bytes there: `numpy`, `numba`, `torch` or `triton`.",
    "dtype": "Code of the safetensors header, as `BF16`.",
    "end": "The byte after the last.",
    "engines": "The engines that take these bytes.",
    "experts": "Number of routed experts, E.",
    "family": "What moeconv calls the model line.",
    "file": "Path in the directory.",
    "files": "The weight files that were read.",
    "first": "First expert of the range.",
    "format": "Format of this file.",
    "gated": "Whether the experts have a gate projection.",
    "header_sha256": "SHA-256 of the file's header.",
    "hidden": "Hidden size, H.",
    "id": "The layout's name.",
    "intermediate": "Intermediate size, I, without padding.",
    "jobs_resumed": "Shards that an earlier run had finished.",
    "last": "Last expert of the range, included.",
    "layer": "Number of the layer.",
    "layout": "The byte order of the experts.",
    "model_types": "`model_type` of the model, then of its text part.",
    "name": "Name.",
    "order": "How gate and up rows stand in a fused source: `halves` or `pairs`.",
    "param": "The engine's parameter, as `w13_weight`.",
    "path": "Path in the directory.",
    "peak_device_bytes": "Most GPU memory that its buffers took; 0 on a CPU.",
    "peak_rss_bytes": "Peak resident memory of that process.",
    "prefix": "Module that holds the experts, by its name in the checkpoint.",
    "probe_xxh3": "XXH3-128 of 64 KiB at the start, middle and end of the data.",
    "rank": "The TP rank it is for; `null` in a file that serves any TP size.",
    "revision": "Revision on the Hub, where it is known.",
    "run": "How the last run went.",
    "scheme": "How the source stores a matrix.",
    "seconds": "Time that process took.",
    "sha256": "SHA-256 of the file, where it is known.",
    "shape": "Shape.",
    "size": "Size in bytes.",
    "source": "Where the bytes came from.",
    "stacks": "The experts of each layer.",
    "tools": "Versions of what took part.",
    "tp_sizes": "TP sizes that this file serves, of 1, 2, 4, 8, 16 and 32.",
    "version": "Raised whenever the bytes of the same source change.",
    "versions": "Versions of the engine.",
    "workers": "Threads.",
    "xxh3": "XXH3-128 of the bytes: one digest, or one an expert.",
}
"""Meanings of fields that need no sentence in every class that has them."""


def cli_page() -> str:
    """Return the reference of the command line, as Typer writes it."""
    command = [sys.executable, "-m", "typer", "moeconv.cli", "utils", "docs", "--name", "moeconv"]
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)  # noqa: S603
    # Typer leaves `<n>` outside of code, where Markdown takes it for HTML.
    parts = re.split(r"(```.*?```|`[^`\n]*`)", done.stdout, flags=re.DOTALL)
    parts[::2] = [part.replace("<", r"\<") for part in parts[::2]]
    lines = (line.rstrip() for line in "".join(parts).strip().splitlines())
    return NOTE + "\n" + "\n".join(lines) + "\n"


def manifest_page() -> str:
    """Return the reference of `moeconv.json`, from its dataclasses and their docstrings."""
    parts = [NOTE, f"# `{MANIFEST_NAME}`\n", MANIFEST_TEXT]
    for kind in _reachable(Manifest):
        about, meanings = _docstring(kind)
        parts += [f"## {_words(kind)}\n", about + "\n"]
        hints = get_type_hints(kind)
        parts.append(
            table(
                ("field", "type", "meaning"),
                (
                    (
                        f"`{field.name}`",
                        _type(hints[field.name]),
                        _meaning(kind, field.name, meanings),
                    )
                    for field in dataclasses.fields(kind)
                ),
            )
        )
    return "\n".join(parts)


def schema() -> str:
    """Return the JSON Schema of the manifest."""
    return json.dumps(msgspec.json.schema(Manifest), indent=1) + "\n"


def inspect_schema() -> str:
    """Return the JSON Schema of what `moeconv inspect --json` prints."""
    return json.dumps(msgspec.json.schema(Inspection), indent=1) + "\n"


def support_page() -> str:
    """Return what can be converted into what, and which engine takes it."""
    layouts = table(
        ("layout", "version", "takes", "engine", "engine versions", "selected there by"),
        (
            (
                f"`{layout.id}`",
                str(layout.version),
                ", ".join(layout.schemes),
                engine.name,
                f"`{engine.versions}`",
                f"`{engine.backend}`",
            )
            for layout in LAYOUTS
            for engine in layout.engines
        ),
    )
    families = table(
        ("family", "`model_type`", "experts", "stored as"),
        (
            (
                f"`{family.name}`",
                ", ".join(f"`{name}`" for name in family.model_types),
                "gate, up, down" if family.gated else "up, down",
                "; ".join(
                    ", ".join(f"`{name}`" for _, name in storage.names)
                    + (" (transposed)" if storage.transposed else "")
                    for storage in family.storages
                ),
            )
            for family in FAMILIES
        ),
    )
    schemes = table(
        ("scheme", "tensors of a matrix", "converted by"),
        (
            (
                scheme.name,
                ", ".join(
                    " or ".join(f"`{suffix}`" for suffix in row.suffixes if suffix)
                    + f" ({'/'.join(row.dtypes)})"
                    + (", optional" if row.optional else "")
                    for row in scheme.parts
                ),
                ", ".join(f"`{x.id}`" for x in LAYOUTS if scheme.name in x.schemes)
                or f"refused: {scheme.advice}",
            )
            for scheme in SCHEMES
        ),
    )
    parts = (
        *(NOTE, SUPPORT_TEXT, layouts, FAMILIES_TEXT, families, "## Schemes\n", schemes),
        *(TAKES_TEXT, _takes(), ROWS_TEXT, _rows()),
    )
    return "\n".join(parts)


def readme() -> str:
    """Return the README with its support table made anew."""
    rows: dict[tuple[str, ...], dict[str, None]] = {}
    for layout in LAYOUTS:
        for engine in layout.engines:
            row = (f"`moeconv {make_command(layout)}`", *_served(layout, engine))
            rows.setdefault(row, {}).update(dict.fromkeys(layout.schemes))
    shown = table(
        ("experts stored as", "command", "engine", "its flag", "GPU"),
        ((", ".join(schemes), *row) for row, schemes in rows.items()),
    )
    count = sum(len(family.model_types) for family in FAMILIES)
    names = ", ".join(family.name for family in FAMILIES)
    families = f"\n{len(FAMILIES)} families, {count} model types: {names}.\n"
    return _between_marks("../README.md", f"{shown}{families}")


def performance_page() -> str:
    """Return the page on performance with its tables made anew."""
    return _between_marks("explanation/performance.md", *performance_tables())


def _between_marks(page: str, *made: str) -> str:
    """Return a page with what stands between each pair of its marks made anew."""
    parts = (DOCS / page).read_text(encoding="utf-8").split(TABLE_MARK)
    parts[1::2] = [f"\n\n{each}\n" for each in made]
    return TABLE_MARK.join(parts)


def _served(layout: Layout, engine: Engine) -> tuple[str, str, str]:
    """Return an engine with its versions, what selects the kernel there, and the GPU for it."""
    kind = Kind(layout.schemes[0], 8, 2048, 1024, gated=True)
    model = model_of(FAMILIES[0], {"model_type": FAMILIES[0].model_types[0]}, (kind,), ())
    needs = next(one.needs for one in answers(layout, model) if one.engine == engine)
    gpus = "; ".join(need.removeprefix("a GPU of ") for need in needs if "capability" in need)
    return f"{engine.name} `{engine.versions}`", f"`{engine.backend}`", gpus


def _takes() -> str:
    """Return which engine takes which family in which layout, and the notes to it."""
    notes: dict[str, int] = {}
    columns = [(layout, engine) for layout in LAYOUTS for engine in layout.engines]
    header = ("family", *(f"`{layout.id}`, {engine.name}" for layout, engine in columns))
    rows = [
        (f"`{family.name}`", *(_cell(family, *column, notes) for column in columns))
        for family in FAMILIES
    ]
    listed = "\n".join(f"{number}. {reason}" for reason, number in notes.items())
    return f"{table(header, rows)}\n{listed}\n"


def _cell(family: Family, layout: Layout, engine: Engine, notes: dict[str, int]) -> str:
    """Return what an engine says to the models of a family, by sizes that need no padding."""
    order = "pairs" if "pairs" in {storage.order for storage in family.storages} else "halves"
    sizes = Geometry(8, 2048, 1024, family.gated, order)
    is_other = order not in layout.orders or ("gptoss" in layout.id and order != "pairs")
    if family.refusal or is_other or layout.refusal(sizes):
        return "no"
    said: dict[str, list[str]] = {}
    for model_type in family.model_types:
        kind = Kind(layout.schemes[0], sizes.experts, sizes.hidden, sizes.intermediate, sizes.gated)
        model = model_of(family, {"model_type": model_type}, (kind,), ())
        answer = next(one for one in answers(layout, model) if one.engine == engine)
        marks = "".join(f" ({notes.setdefault(why, len(notes) + 1)})" for why in answer.reasons)
        said.setdefault(answer.word.replace("yes, but", "but") + marks, []).append(model_type)
    if len(said) == 1:
        return next(iter(said))
    return "; ".join(f"{', '.join(types)}: {word}" for word, types in said.items())


def _rows() -> str:
    """Return the table of what engines do not take."""
    words = {"no": "does not take", "but": "takes one way", "needs": "needs"}
    return table(
        ("engine", "layout", "it", "what"),
        (
            (
                ", ".join(row.engines),
                ", ".join(
                    f"`{name}*`" if name.endswith("-") else f"`{name}`" for name in row.layouts
                ),
                words[row.weight],
                re.sub(r"\{(\w+)\}", lambda found: f"*{found[1].replace('_', ' ')}*", row.words),
            )
            for row in ROWS
        ),
    )


def _meaning(kind: type, field: str, meanings: Mapping[str, str]) -> str:
    """Return what a field means: its class says so, or it means the same everywhere."""
    text = meanings.get(field) or COMMON_FIELDS.get(field)
    if text is None:
        message = f"say what `{kind.__name__}.{field}` means, in its class's docstring"
        raise LookupError(message)
    return text.replace("`None`", "`null`")


def _reachable(kind: type) -> Iterator[type]:
    """Yield a dataclass, then those its fields hold, each once."""
    seen: dict[type, None] = {kind: None}
    for found in _growing(seen):
        for hint in get_type_hints(found).values():
            for part in (hint, *get_args(hint)):
                if dataclasses.is_dataclass(part) and isinstance(part, type):
                    seen.setdefault(part)
        yield found


def _growing(seen: Mapping[type, None]) -> Iterator[type]:
    """Yield the keys of a mapping that gets longer meanwhile."""
    at = 0
    while at < len(seen):
        yield list(seen)[at]
        at += 1


def _docstring(kind: type) -> tuple[str, dict[str, str]]:
    """Return the text of a numpydoc docstring, and its attributes."""
    text = inspect.cleandoc(kind.__doc__ or "")
    about, _, rest = text.partition("\nAttributes\n----------\n")
    fields: dict[str, str] = {}
    for names, meaning in re.findall(r"^(\w[\w, ]*)\n((?:    .*\n?)+)", rest, re.MULTILINE):
        for name in names.split(", "):
            fields[name] = " ".join(line.strip() for line in meaning.splitlines())
    return about.strip(), fields


def _words(kind: type) -> str:
    """Return `EngineEntry` as `engine entry`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower().capitalize()


def _type(hint: Any) -> str:  # noqa: ANN401
    """Return a type in words; dataclasses link to their section."""
    args = get_args(hint)
    if isinstance(hint, types.UnionType):
        return " or ".join(_type(arg) for arg in args)
    if hint is type(None):
        return "null"
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        name = _words(hint)
        return f"[{name.lower()}](#{name.lower().replace(' ', '-')})"
    if getattr(hint, "__origin__", None) is tuple:
        return f"list of {_type(args[0])}"
    if getattr(hint, "__origin__", None) is dict:
        return f"object, {_type(args[0])} to {_type(args[1])}"
    return {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}[hint.__name__]


RELIABILITY_TEXT: Final = """\
# What was tried against it

A conversion was ended at every call that touches a disk (open, read, write, fsync, rename, removal;
half of the writes with half of their bytes done), and the same command run again; until it ended,
no reader took the directory. In its place, an ext4 file system in a file was filled, shut down (the
kernel's own fault: what was not fsynced is lost, as with its power), made read-only by an error,
unmounted, or covered by a file system whose server is gone; where a kernel has no quotas, theirs is
injected. Files were changed by chance, and read as commands read them, within 10 seconds and a
gigabyte; led by coverage, what reached new code was changed further. Each row is of a run that
passed; a suite without a row was not run to its end.

`MOECONV_RECORD=docs/figures/reliability.json pytest -m "slow or nightly" tests/test_faults.py
tests/test_fuzz.py tests/test_limits.py tests/test_damage.py tests/test_restore.py
tests/test_resealed.py tests/test_witness.py` makes the figures; the disks want root, and what is
led by coverage wants `atheris`.

"""


def reliability_page() -> str:
    """What the suites that take long tried, how often, and with what result."""
    rows = json.loads((DOCS / "figures" / "reliability.json").read_text(encoding="utf-8"))
    lines = [
        f"| {what} | {row['tried']:,} | {row['result']} | {row['date']} |\n"
        for what, row in rows.items()
    ]
    head = "| what | times | result | date |\n|---|---:|---|---|\n"
    return f"{NOTE}\n{RELIABILITY_TEXT}{head}{''.join(lines)}"


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "../README.md": readme,
    "explanation/performance.md": performance_page,
    "explanation/reliability.md": reliability_page,
    "reference/cli.md": cli_page,
    "reference/manifest.md": manifest_page,
    "reference/manifest.schema.json": schema,
    "reference/inspect.schema.json": inspect_schema,
    "reference/support.md": support_page,
    **{f"images/{name}": draw for name, draw in DRAWINGS.items()},
}


def main() -> int:
    """Write or check every page."""
    is_check = sys.argv[1:] == ["--check"]
    stale = 0
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{'not current' if is_check else 'written'}: docs/{name}")
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if is_check and stale:
        print("run `python docs/generate.py`")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
