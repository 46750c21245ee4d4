"""What does a layout do with rows and bytes? For sizes of one's own, from what conversions use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from moeconv.errors import UnsupportedError
from moeconv.kernels.marlin import row_index
from moeconv.kernels.rowmaps import interleave_rows, shuffle_rows
from moeconv.layouts import named_layout
from moeconv.layouts.layout import Geometry, Slice
from moeconv.layouts.verbs import (
    MARLIN_ROWS,
    SHUFFLE_ROWS,
    GlobalScale,
    MarlinRows,
    MarlinWeight,
    RowBlocks,
    is_lossless,
)

if TYPE_CHECKING:
    from moeconv.layouts.layout import Layout, Output, Placement
    from moeconv.layouts.verbs import Verb

Cell: TypeAlias = tuple[str, int]
"""A short text and the number of its colour."""

_BAR: Final = 64
_GATE, _UP, _OTHER = 0, 1, 2


@dataclass(frozen=True, slots=True)
class RankRange:
    """What a TP rank reads of one stored expert, and the intermediate range that it stands for."""

    rank: int
    begin: int
    end: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """One engine parameter of one expert.

    Attributes
    ----------
    made_from
        The projections above each other, and which part of the scheme.
    source
        Rows, and bytes a row, of the source matrix, zeros included.
    stored, engine
        Shape and dtype in a file for any TP size, and as a rank's kernel sees it.
    steps
        What happens to rows and columns.
    lossless
        Whether every source byte can be got back.
    ranks
        What each rank reads; empty where the file cannot serve this TP size.
    """

    name: str
    made_from: str
    source: tuple[int, int]
    stored: str
    stored_bytes: int
    engine: str
    engine_bytes: int
    steps: str
    lossless: bool
    ranks: tuple[RankRange, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A layout at given sizes.

    Attributes
    ----------
    tp_refusal
        Why one file for any TP size cannot serve this one.
    shares
        The intermediate size of each rank.
    padded
        What the engine pads it to.
    """

    layout: str
    version: int
    schemes: tuple[str, ...]
    experts: int
    hidden: int
    intermediate: int
    gated: bool
    tp: int
    tp_refusal: str | None
    shares: tuple[int, ...]
    padded: int
    parameters: tuple[Parameter, ...]


def explain(name: str, geometry: Geometry, tp: int) -> tuple[Explanation, Layout]:
    """Explain a layout at these sizes.

    Raises
    ------
    UnsupportedError
        There is no such layout, or it does not take these sizes.
    """
    layout = named_layout(name)
    if geometry.order not in layout.orders:
        order = layout.orders[0]
        sizes = (geometry.experts, geometry.hidden, geometry.intermediate, geometry.gated)
        geometry = Geometry(*sizes, order=order)
    reason = layout.refusal(geometry) or layout.rank_refusal(geometry, tp)
    if reason:
        message = f"{layout.id} cannot hold such experts: {reason}"
        raise UnsupportedError(message)
    refusal = layout.tp_refusal(geometry, tp)
    cut = layout.rank_slice(geometry, tp, 0)
    stored = layout.outputs(geometry, Slice(0, geometry.intermediate))
    final = layout.outputs(geometry, cut)
    found = Explanation(
        layout=layout.id,
        version=layout.version,
        schemes=layout.schemes,
        experts=geometry.experts,
        hidden=geometry.hidden,
        intermediate=geometry.intermediate,
        gated=geometry.gated,
        tp=tp,
        tp_refusal=refusal,
        shares=tuple(layout.rank_slice(geometry, tp, rank).size for rank in range(tp)),
        padded=cut.padded or cut.size,
        parameters=tuple(
            _parameter(one, other, () if refusal else _ranks(layout, geometry, tp, one.param))
            for one, other in zip(stored, final, strict=True)
        ),
    )
    return found, layout


def row_map(layout: Layout, geometry: Geometry) -> tuple[str, tuple[tuple[Cell, ...], ...]]:
    """Return which source row each row of a unit of w13 holds, eight a line, and a title."""
    output = layout.outputs(geometry, Slice(0, geometry.intermediate))[0]
    match output.verb:
        case RowBlocks() as verb:
            half = verb.rows // 2 if verb.gated else verb.rows
            rows = shuffle_rows(verb.rows)
            rows = (interleave_rows(verb.rows)[rows] if verb.gated else rows)[:SHUFFLE_ROWS]
            cells = [_row(int(row), half, output.matrix.projections) for row in rows]
            title = f"{output.param}, rows 0 to {SHUFFLE_ROWS - 1}: the source row that each holds"
        case MarlinWeight():
            scale = MarlinRows(MARLIN_ROWS, 1, 1, 1, "wide", stored=True)
            names = output.matrix.projections
            cells = [_row(int(row), MARLIN_ROWS, names[:1]) for row in row_index(scale)]
            title = f"{output.param}_scale, a unit of {MARLIN_ROWS} rows: the source row of each"
        case _:
            return "", ()
    return title, tuple(tuple(cells[i : i + 8]) for i in range(0, len(cells), 8))


def rank_bar(parameter: Parameter) -> tuple[Cell, ...]:
    """Return the bytes of one stored expert from left to right, each with the rank that reads it.

    `*` is read by several ranks, `.` by none.
    """
    cells: list[Cell] = []
    for i in range(_BAR):
        at = (2 * i + 1) * parameter.stored_bytes // (2 * _BAR)
        readers = [one.rank for one in parameter.ranks if one.begin <= at < one.end]
        text = "*" if len(readers) > 1 else f"{readers[0]:x}"[-1] if readers else "."
        cells.append((text, readers[0] if len(readers) == 1 else -1))
    return tuple(cells)


def _row(row: int, half: int, names: tuple[str, ...]) -> Cell:
    name = names[row // half] if row // half < len(names) else names[-1]
    if name == "gate_up":
        return f"{('gate', 'up')[row % 2]} {row // 2}", row % 2
    return f"{name} {row % half}", {"gate": _GATE, "up": _UP}.get(name, _OTHER)


def _parameter(stored: Output, final: Output, ranks: tuple[RankRange, ...]) -> Parameter:
    matrix = stored.matrix
    above = "; ".join(matrix.projections)
    return Parameter(
        name=stored.param,
        made_from=f"[{above}] {matrix.part}" if "; " in above else f"{above} {matrix.part}",
        source=matrix.shape,
        stored=str(stored.spec),
        stored_bytes=stored.spec.nbytes,
        engine=str(final.spec),
        engine_bytes=final.spec.nbytes,
        steps=_steps(stored.verb),
        lossless=is_lossless(stored.verb),
        ranks=ranks,
    )


def _ranks(layout: Layout, geometry: Geometry, tp: int, param: str) -> tuple[RankRange, ...]:
    found = []
    for rank in range(tp):
        cut = layout.rank_slice(geometry, tp, rank)
        place = _placement(layout.placements(geometry, tp, rank), param)
        found.append(RankRange(rank, place.begin, place.end, cut.start, cut.stop))
    return tuple(found)


def _placement(placements: tuple[Placement, ...], param: str) -> Placement:
    return next(placement for placement in placements if placement.param == param)


def _steps(verb: Verb) -> str:
    """Say what a verb does, as its docstring and the kernels' have it."""
    match verb:
        case RowBlocks():
            first = (
                "rows become pairs (up 0, gate 0, up 1, gate 1, ...), then " if verb.gated else ""
            )
            return (
                f"{first}row 4a + b of every 32 goes to a + 8b; K is cut into blocks of 128 "
                "bytes (64 values), the block outside the row"
            )
        case MarlinWeight():
            return (
                "64 rows x 16 values of K become a run of 512 bytes: word 16c + 4t + j holds "
                "values 2t, 2t + 8, 2t + 1, 2t + 9 of rows 16j + c and 16j + c + 8"
            )
        case MarlinRows():
            recoded = "; each byte is recoded (E4M3 to S0E5M3)" if verb.recode else ""
            return f"transposed, the group outside the row, and permuted within 64 rows{recoded}"
        case GlobalScale():
            taken = "the largest" if verb.largest else verb.dtype
            return f"times 2^{verb.exponent}, divided by the layer's factor, as {taken}"
