"""Verbs on tensors of one device, many experts at once, in torch alone.

What a GPU without Triton runs; slower than Triton's kernels, and it takes device memory beside its
arguments: up to four times the bytes of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from moeconv.kernels.marlin import unit_order
from moeconv.kernels.rowmaps import block_index, inverse_block_index
from moeconv.kernels.scalars import global_scales
from moeconv.kernels.tables import Tables, inverse_recodes, recodes, unit_places
from moeconv.layouts.verbs import (
    K_BLOCK_BYTES,
    MARLIN_ROWS,
    GlobalScale,
    MarlinRows,
    MarlinWeight,
    RowBlocks,
)

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Verb

_ITEM_WORDS: Final = K_BLOCK_BYTES // 8
_BF16_BYTES: Final = 2
_MANTISSA_BITS: Final = 23
_MANTISSA: Final = 0x7FFFFF
_HALF: Final = 0x400000
_NAN_EXPONENT: Final = 255
_NAN: Final = 0x7FC00000


class TorchBatch:
    """Satisfies `kernels.cuda.Batch` on any torch device."""

    name = "torch"
    spare = 4

    def __init__(self, device: torch.device) -> None:
        self._tables = Tables(device)

    def lay_out_batch(self, verb: Verb, sources: torch.Tensor, outs: torch.Tensor) -> None:
        """Fill `outs`."""
        match verb:
            case RowBlocks():
                self._take(verb, sources, outs, inverse=False)
            case MarlinWeight():
                _repack(verb, sources, outs)
            case MarlinRows():
                self._permute(verb, sources, outs)
            case GlobalScale():
                _scale(verb, sources, outs)

    def invert_batch(self, verb: Verb, stored: torch.Tensor, sources: torch.Tensor) -> None:
        """Fill `sources`."""
        match verb:
            case RowBlocks():
                self._take(verb, stored, sources, inverse=True)
            case MarlinWeight():
                _unrepack(verb, stored, sources)
            case MarlinRows():
                self._unpermute(verb, stored, sources)
            case GlobalScale():
                pass

    def _take(
        self, verb: RowBlocks, given: torch.Tensor, wanted: torch.Tensor, *, inverse: bool
    ) -> None:
        index = self._tables.get(inverse_block_index if inverse else block_index, verb)
        blocks, out = (x.view(torch.int64).view(len(x), -1, _ITEM_WORDS) for x in (given, wanted))
        torch.index_select(blocks, 1, index, out=out)

    def _permute(self, verb: MarlinRows, sources: torch.Tensor, outs: torch.Tensor) -> None:
        items = _exponents(verb, sources) if verb.power_bytes else _items(verb, sources)
        if verb.recode:
            items = self._recoded(verb, items, inverse=False)
        rows = items.view(_rows_shape(verb, len(sources)))
        _positions(verb, outs).copy_(rows[:, :, :, self._tables.get(unit_order, verb.order)])

    def _unpermute(self, verb: MarlinRows, stored: torch.Tensor, sources: torch.Tensor) -> None:
        rows = _positions(verb, stored)[:, :, :, self._tables.get(unit_places, verb.order)]
        items = rows.contiguous().view(len(sources), -1)
        if verb.recode:
            items = self._recoded(verb, items, inverse=True)
        if verb.power_bytes:
            _powers(verb, items, sources)
        else:
            _items(verb, sources).copy_(items)

    def _recoded(self, verb: MarlinRows, items: torch.Tensor, *, inverse: bool) -> torch.Tensor:
        tables = self._tables.get(inverse_recodes if inverse else recodes, verb.recode)
        halves = items.view(len(items), verb.halves, -1)
        found = [tables[half][halves[:, half].int()] for half in range(verb.halves)]
        return torch.stack(found, dim=1).view(len(items), -1)


def _scale(verb: GlobalScale, sources: torch.Tensor, outs: torch.Tensor) -> None:
    """Fill in one number an expert, on the host: there are too few to be worth a kernel."""
    laid = np.empty(tuple(outs.shape), np.uint8)
    global_scales(verb, sources.cpu().numpy(), laid)
    outs.copy_(torch.from_numpy(laid))


def _items(verb: MarlinRows, x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16) if verb.item_bytes > 1 else x


def _rows_shape(verb: MarlinRows, count: int) -> tuple[int, ...]:
    """Return a batch of source matrices in items: `[n, half, unit, row, group]`."""
    return count, verb.halves, verb.rows // MARLIN_ROWS, MARLIN_ROWS, verb.groups


def _positions(verb: MarlinRows, outs: torch.Tensor) -> torch.Tensor:
    """View a batch of results as `[n, half, unit, position, group]` items."""
    items, units = _items(verb, outs), verb.rows // MARLIN_ROWS
    if verb.stored:
        return items.view(-1, units, verb.halves, verb.groups, MARLIN_ROWS).permute(0, 2, 1, 4, 3)
    return items.view(-1, verb.groups, verb.halves, units, MARLIN_ROWS).permute(0, 2, 3, 4, 1)


def _exponents(verb: MarlinRows, sources: torch.Tensor) -> torch.Tensor:
    """Return exponent bytes, as `kernels.scalars.power_bytes` defines them."""
    if verb.power_bytes == _BF16_BYTES:
        bits = sources.view(torch.int16).int() << 16
    else:
        bits = sources.view(torch.int32)
    exponent, mantissa = bits >> _MANTISSA_BITS & 0xFF, bits & _MANTISSA
    # Below the smallest normal number only what is over its half rounds up to it.
    half = torch.where(exponent > 0, mantissa >= _HALF, mantissa > _HALF)
    return (exponent + (half & (exponent < _NAN_EXPONENT))).to(torch.uint8)


def _powers(verb: MarlinRows, exponents: torch.Tensor, sources: torch.Tensor) -> None:
    """Fill in powers of two, as `kernels.scalars.source_powers` defines them."""
    wide = exponents.int()
    bits = torch.where(wide == 0, _HALF, wide << _MANTISSA_BITS)
    bits = torch.where(wide == _NAN_EXPONENT, _NAN, bits)
    if verb.power_bytes == _BF16_BYTES:
        sources.view(torch.int16).copy_(bits >> 16)
    else:
        sources.view(torch.int32).copy_(bits)


def _words(verb: MarlinWeight, sources: torch.Tensor) -> torch.Tensor:
    """View a batch of source matrices as `[n, h, u, j, row or row + 8, c, tile, A or B]` words."""
    units = verb.rows // MARLIN_ROWS
    return sources.view(torch.int32).view(-1, verb.halves, units, 4, 2, 8, verb.tiles, 2)


def _runs(verb: MarlinWeight, outs: torch.Tensor) -> torch.Tensor:
    """View a batch of results as `[n, h, u, t, j, c, tile]` words."""
    words, units = outs.view(torch.int32), verb.rows // MARLIN_ROWS
    if verb.stored:
        runs = words.view(-1, units, verb.halves, verb.tiles, 8, 4, 4)
        return runs.permute(0, 2, 1, 5, 6, 4, 3)
    return words.view(-1, verb.tiles, verb.halves, units, 8, 4, 4).permute(0, 2, 3, 5, 6, 4, 1)


def _repack(verb: MarlinWeight, sources: torch.Tensor, outs: torch.Tensor) -> None:
    """Repack as `kernels.marlin` describes it; half rows of a tile are the elements."""
    words, runs = _words(verb, sources), _runs(verb, outs)
    a, b = words[..., 0], words[..., 1]
    low = (a & 0x0F0F0F0F) | ((b & 0x0F0F0F0F) << 4)
    high = ((a >> 4) & 0x0F0F0F0F) | (b & -0x0F0F0F10)
    rows = [low[:, :, :, :, 0], low[:, :, :, :, 1], high[:, :, :, :, 0], high[:, :, :, :, 1]]
    _transpose(rows)
    for t, row in enumerate(rows):
        runs[:, :, :, t].copy_(row)


def _unrepack(verb: MarlinWeight, stored: torch.Tensor, sources: torch.Tensor) -> None:
    """Undo `_repack`."""
    words, runs = _words(verb, sources), _runs(verb, stored)
    rows = [runs[:, :, :, t].contiguous() for t in range(4)]
    _transpose(rows)
    for side in range(2):
        low, high = rows[side], rows[2 + side]
        words[:, :, :, :, side, ..., 0] = (low & 0x0F0F0F0F) | ((high & 0x0F0F0F0F) << 4)
        words[:, :, :, :, side, ..., 1] = ((low >> 4) & 0x0F0F0F0F) | (high & -0x0F0F0F10)


def _transpose(rows: list[torch.Tensor]) -> None:
    """Transpose the 4x4 bytes of four int32 tensors in place; its own inverse."""
    for a, b, shift, mask in (
        (0, 2, 16, 0x0000FFFF),
        (1, 3, 16, 0x0000FFFF),
        (0, 1, 8, 0x00FF00FF),
        (2, 3, 8, 0x00FF00FF),
    ):
        t = ((rows[a] >> shift) ^ rows[b]) & mask
        rows[b] = rows[b] ^ t
        rows[a] = rows[a] ^ (t << shift)
