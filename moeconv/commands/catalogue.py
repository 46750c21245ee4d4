"""What do `list` and `explain` show? What moeconv knows, and what a layout does."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from moeconv import report
from moeconv.families import FAMILIES
from moeconv.inspection.explanation import explain, rank_bar, row_map
from moeconv.layouts import LAYOUTS
from moeconv.planning.acceptance import make_command
from moeconv.schemes import SCHEMES

if TYPE_CHECKING:
    from moeconv.inspection.explanation import Explanation, Parameter
    from moeconv.layouts.layout import Geometry, Layout

_CELL_WIDTH: Final = 9


def run_list(*, as_json: bool) -> None:
    """Show what there is."""
    if as_json:
        report.emit({"event": "list", **_known()})
        return
    report.grid(
        "families (--family)",
        ("family", "model_type"),
        [(family.name, ", ".join(family.model_types)) for family in FAMILIES],
        wraps=True,
    )
    report.grid(
        "schemes",
        ("scheme", "converted to"),
        [
            (scheme.name, ", ".join(_takers(scheme.name)) or f"refused: {scheme.advice}")
            for scheme in SCHEMES
        ],
        wraps=True,
    )
    report.grid(
        "layouts",
        ("layout", "from", "command"),
        [(it.id, ", ".join(it.schemes), f"moeconv {make_command(it)}") for it in LAYOUTS],
        wraps=True,
    )
    report.grid(
        "engines",
        ("engine", "flags", "layouts"),
        [
            (f"{name} {versions}", flags, "\n".join(ids))
            for (name, versions, flags), ids in _by_engine().items()
        ],
        wraps=True,
    )


def _known() -> dict[str, object]:
    return {
        "families": [
            {
                "name": family.name,
                "model_types": family.model_types,
                "gated": family.gated,
                "refusal": family.refusal,
            }
            for family in FAMILIES
        ],
        "schemes": [
            {"name": scheme.name, "layouts": _takers(scheme.name), "advice": scheme.advice}
            for scheme in SCHEMES
        ],
        "layouts": [
            {
                "id": layout.id,
                "version": layout.version,
                "command": make_command(layout),
                "schemes": layout.schemes,
                "engines": [asdict(engine) for engine in layout.engines],
            }
            for layout in LAYOUTS
        ],
    }


def run_explain(name: str, geometry: Geometry, tp: int, *, as_json: bool) -> None:
    """Show what a layout does."""
    found, layout = explain(name, geometry, tp)
    if as_json:
        report.emit({"event": "explanation", **asdict(found)})
        return
    _show_explanation(found, layout, geometry)


def _takers(scheme: str) -> list[str]:
    return [layout.id for layout in LAYOUTS if scheme in layout.schemes]


def _by_engine() -> dict[tuple[str, str, str], list[str]]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for layout in LAYOUTS:
        for engine in layout.engines:
            key = (engine.name, engine.versions, engine.backend)
            found.setdefault(key, []).append(layout.id)
    return found


def _show_explanation(found: Explanation, layout: Layout, geometry: Geometry) -> None:
    rows = [
        ("takes", ", ".join(found.schemes)),
        (
            "sizes",
            (
                f"{found.experts} experts, hidden {found.hidden}, "
                f"intermediate {found.intermediate}, {'gated' if found.gated else 'no gate'}"
            ),
        ),
    ]
    rows += [(it.name, f"{it.versions}, {it.backend}") for it in layout.engines]
    shares = [str(size) for size in found.shares]
    share = shares[0] if len(set(shares)) == 1 else ", ".join(shares)
    is_padded = found.padded > min(found.shares)
    padded = f"padded with zeros to {found.padded}" if is_padded else "not padded"
    rows.append(("a rank", f"of TP {found.tp}: {share} of the intermediate size, {padded}"))
    if found.tp_refusal:
        rows.append(("file", f"TP {found.tp} needs its own (--tp {found.tp}): {found.tp_refusal}"))
    else:
        rows.append(("file", f"one for any TP; rank by rank below for TP {found.tp}"))
    report.table(f"{found.layout} version {found.version}", rows, to_stdout=True)
    for one in found.parameters:
        _show_parameter(one)
    title, lines = row_map(layout, geometry)
    if lines:
        report.heading(title)
    for line in lines:
        report.cells("  ", [(f"{text:{_CELL_WIDTH}}", colour) for text, colour in line])
    report.heading("what the engine does with it")
    report.text(
        "Each rank reads its experts' ranges, one a parameter and expert, into the parameters' own "
        "storage, adds the zeros of its padding, and builds its kernel. No transform is left."
    )


def _show_parameter(one: Parameter) -> None:
    report.heading(one.name)
    lost = "" if one.lossless else "; some bytes are not kept"
    report.table(
        "",
        [
            ("  made from", f"{one.made_from}, {one.source[0]} × {one.source[1]} bytes"),
            ("  stored", f"{one.stored}, {report.size(one.stored_bytes)} an expert"),
            ("  engine", f"{one.engine}, {report.size(one.engine_bytes)} an expert"),
            ("  how", one.steps + lost),
            *([("  reads", _reads(one))] if one.ranks else []),
        ],
        to_stdout=True,
    )
    if one.ranks:
        report.cells("  ranks      ", rank_bar(one))


def _reads(one: Parameter) -> str:
    """Say how many bytes each rank reads, one range an expert."""
    sizes = [rank.end - rank.begin for rank in one.ranks]
    if len(set(sizes)) == 1:
        return f"each rank {report.size(sizes[0])} of each expert"
    return "by rank, of each expert: " + ", ".join(map(report.size, sizes))
