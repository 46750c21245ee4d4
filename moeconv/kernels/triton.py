"""Verbs on tensors of one device, many experts a launch, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton

from moeconv.kernels.marlin import unit_order
from moeconv.kernels.rowmaps import source_rows
from moeconv.kernels.tables import Tables, inverse_recodes, recodes
from moeconv.kernels.torch import TorchBatch
from moeconv.kernels.triton_moves import move_blocks, move_rows, move_tiles
from moeconv.layouts.verbs import (
    K_BLOCK_BYTES,
    MARLIN_ROWS,
    SHUFFLE_ROWS,
    GlobalScale,
    MarlinRows,
    MarlinWeight,
    RowBlocks,
)

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Verb

# How much one program moves, and with how many warps. Measured on an H200: whatever is near these
# is within a few per cent of a copy, for all shapes and both ways. No kernel computes with floats;
# a newer Triton warns where nothing is said of them.
_BLOCKS: Final = {"BLOCKS": 2, "num_warps": 8, "enable_fp_fusion": False}
_TILES: Final = {"TILES": 32, "num_warps": 8, "enable_fp_fusion": False}
_GROUPS: Final = {"GROUPS": 128, "num_warps": 2, "enable_fp_fusion": False}


class TritonBatch:
    """Satisfies `kernels.cuda.Batch`; on the host too, where Triton interprets its kernels."""

    name = "triton"
    spare = 0

    def __init__(self, device: torch.device) -> None:
        self._tables = Tables(device)
        self._scalars = TorchBatch(device)

    def lay_out_batch(self, verb: Verb, sources: torch.Tensor, outs: torch.Tensor) -> None:
        """Fill `outs`."""
        if isinstance(verb, GlobalScale):
            self._scalars.lay_out_batch(verb, sources, outs)
        else:
            self._move(verb, sources, outs, back=False)

    def invert_batch(self, verb: Verb, stored: torch.Tensor, sources: torch.Tensor) -> None:
        """Fill `sources`."""
        if not isinstance(verb, GlobalScale):
            self._move(verb, sources, stored, back=True)

    def _move(
        self,
        verb: RowBlocks | MarlinWeight | MarlinRows,
        sources: torch.Tensor,
        laid: torch.Tensor,
        *,
        back: bool,
    ) -> None:
        match verb:
            case RowBlocks():
                self._move_blocks(verb, sources, laid, back=back)
            case MarlinWeight():
                _move_tiles(verb, sources, laid, back=back)
            case MarlinRows():
                self._move_rows(verb, sources, laid, back=back)

    def _move_blocks(
        self, verb: RowBlocks, sources: torch.Tensor, laid: torch.Tensor, *, back: bool
    ) -> None:
        blocks = verb.row_bytes // K_BLOCK_BYTES
        programs = verb.rows // SHUFFLE_ROWS * triton.cdiv(blocks, _BLOCKS["BLOCKS"])
        move_blocks[programs, len(sources)](
            sources.view(torch.int64),
            laid.view(torch.int64),
            self._tables.get(source_rows, verb),
            verb.rows,
            blocks,
            verb.unit_rows,
            BACK=back,
            **_BLOCKS,
        )

    def _move_rows(
        self, verb: MarlinRows, sources: torch.Tensor, laid: torch.Tensor, *, back: bool
    ) -> None:
        units = verb.rows // MARLIN_ROWS
        # Without a recode any table will do: it is not read.
        tables = self._tables.get(
            inverse_recodes if back else recodes, verb.recode or (bytes(256),)
        )
        shape = verb.halves, units, verb.groups
        programs = units * triton.cdiv(verb.groups, _GROUPS["GROUPS"]), verb.halves, len(sources)
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        move_rows[programs](
            sources.view(kinds[verb.power_bytes or verb.item_bytes]),
            laid.view(kinds[verb.item_bytes]),
            self._tables.get(unit_order, verb.order),
            tables,
            shape,
            _strides(shape, stored=verb.stored),
            POWER=verb.power_bytes,
            RECODED=bool(verb.recode),
            BACK=back,
            **_GROUPS,
        )


def _move_tiles(
    verb: MarlinWeight, sources: torch.Tensor, laid: torch.Tensor, *, back: bool
) -> None:
    units = verb.rows // MARLIN_ROWS
    shape = verb.halves, units, verb.tiles
    move_tiles[units * triton.cdiv(verb.tiles, _TILES["TILES"]), verb.halves, len(sources)](
        sources.view(torch.int64),
        laid.view(torch.int32),
        shape,
        _strides(shape, stored=verb.stored),
        BACK=back,
        **_TILES,
    )


def _strides(shape: tuple[int, int, int], *, stored: bool) -> tuple[int, int, int]:
    """Return how far a half, a unit and a run (or group) are apart in a result, in runs."""
    halves, units, runs = shape
    if stored:
        return runs, halves * runs, 1
    return units, 1, halves * units
