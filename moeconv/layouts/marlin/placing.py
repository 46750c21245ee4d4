"""Which bytes of a stored Marlin parameter are a rank's, and where do they go?"""

from __future__ import annotations

from moeconv.layouts.layout import Output, Placement, Slice
from moeconv.layouts.verbs import MARLIN_ROWS, MARLIN_TILE
from moeconv.tensors import round_up


def is_unit_major(output: Output) -> bool:
    """Return whether TP cuts whole units of a stored parameter: w13, but for its globals."""
    return output.matrix.projections != ("down",) and output.matrix.part != "global_scale"


def placed_rows(
    final: Output, stored: Output, cut: Slice, group: int, *, is_whole: bool
) -> Placement:
    """Return where a rank's rows of w2 are, of its scales, or one value of an expert as a whole.

    Parameters
    ----------
    final, stored
        The parameter as the rank holds it, and as the file does.
    cut
        The rank's range of the intermediate size.
    group
        Values a block scale covers.
    is_whole
        There is one rank: it reads padding too.
    """
    rows, kept = 1, final.spec.nbytes
    begin, end = 0, 0 if final.matrix.blank else 1
    if final.matrix.part in {"weight", "weight_scale"}:
        values = MARLIN_TILE if final.matrix.part == "weight" else group
        rows = final.spec.shape[0]
        kept = final.spec.nbytes // rows
        begin, end = cut.start // values, round_up(cut.stop, values) // values
        if is_whole:
            end = stored.spec.shape[0]
    return Placement(
        final.param,
        final.spec,
        begin * kept,
        end * kept,
        stored=(end - begin,),
        axes=(0,),
        final=(rows,),
        item_bytes=kept,
    )


def placed_columns(final: Output, stored: Output, cut: Slice, unit: int) -> Placement:
    """Return where a rank's units of w13 are, each `unit` values of the intermediate size."""
    begin = cut.start // unit
    end = round_up(cut.stop, unit) // unit if cut.size else begin
    units, halves, *lines, _ = stored.spec.shape
    item = stored.spec.nbytes // (units * halves * (lines[0] if lines else 1))
    unit_bytes = stored.spec.nbytes // units
    rows = final.matrix.rows // MARLIN_ROWS
    return Placement(
        final.param,
        final.spec,
        begin * unit_bytes,
        end * unit_bytes,
        stored=(end - begin, halves, *lines),
        axes=(2, 1, 0) if lines else (1, 0),
        final=(*lines, halves, rows),
        item_bytes=item,
    )
