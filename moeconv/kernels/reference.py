"""The definition of right: each verb in plain torch, as the engine's own words put it.

Slow and short. The contract suite holds every other kernel set to these bytes. Shapes: `M` rows,
`K` bytes or values of a row, `U` units, `H` halves, `G` groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from moeconv.kernels.scalars import global_scale
from moeconv.layouts.verbs import (
    K_BLOCK_BYTES,
    MARLIN_ROWS,
    MARLIN_TILE,
    SHUFFLE_ROWS,
    GlobalScale,
    MarlinRows,
    MarlinWeight,
    RowBlocks,
)

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Verb
    from moeconv.tensors import Bytes


class ReferenceKernels:
    """Satisfies `layouts.verbs.Kernels`."""

    device = "cpu"
    name = "reference"

    def lay_out(self, verb: Verb, source: Bytes, out: Bytes) -> None:
        """Fill `out`."""
        if isinstance(verb, GlobalScale):
            global_scale(verb, source, out)
            return
        torch.from_numpy(out).copy_(_laid_out(verb, torch.from_numpy(source)).reshape(-1))

    def invert(self, verb: Verb, stored: Bytes, source: Bytes) -> None:
        """Fill `source` by finding out where each of its bytes went."""
        match verb:
            case RowBlocks() | MarlinWeight():
                self._invert_bijection(verb, stored, source)
            case MarlinRows() if verb.power_bytes:
                exponents = np.empty((source.shape[0], verb.groups), np.uint8)
                self.invert(replace(verb, power_bytes=0), stored, exponents)
                powers = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
                wide = (
                    torch.float32 if verb.power_bytes == torch.float32.itemsize else torch.bfloat16
                )
                torch.from_numpy(source).view(wide).copy_(powers.to(wide))
            case MarlinRows():
                bare = MarlinRows(
                    verb.rows,
                    verb.halves,
                    verb.groups,
                    verb.item_bytes,
                    verb.order,
                    stored=verb.stored,
                )
                self._invert_bijection(bare, stored, source)
                for half, table in zip(source.reshape(verb.halves, -1), verb.recode, strict=False):
                    lowest = np.array([max(table.find(byte), 0) for byte in range(256)], np.uint8)
                    half[...] = lowest[half]
            case GlobalScale():
                pass

    def _invert_bijection(self, verb: Verb, stored: Bytes, source: Bytes) -> None:
        """Lay out each bit of every byte's number: what comes out says which byte went there."""
        count = source.size
        nibbles = 2 if isinstance(verb, MarlinWeight) else 1
        wanted = np.zeros((nibbles, count), np.int64)
        for nibble in range(nibbles):
            shift = 4 * nibble
            for bit in range(max(1, count * nibbles - 1).bit_length()):
                number = np.arange(count) * nibbles + nibble
                probe = np.zeros((nibbles, count), np.uint8)
                for other in range(nibbles):
                    number = np.arange(count) * nibbles + other
                    probe[other] = (number >> bit & 1) << (4 * other)
                laid = np.empty(stored.size, np.uint8)
                self.lay_out(verb, probe.sum(axis=0, dtype=np.uint8).reshape(source.shape), laid)
                wanted[nibble] |= (laid.astype(np.int64) >> shift & 1) << bit
        flat = np.zeros(count, np.uint8)
        for nibble in range(nibbles):
            mask = 0xFF if nibbles == 1 else 0x0F
            value = stored >> np.uint8(4 * nibble) & np.uint8(mask)
            target, half = wanted[nibble] // nibbles, wanted[nibble] % nibbles
            np.bitwise_or.at(flat, target, value << (4 * half).astype(np.uint8))
        source.reshape(-1)[...] = flat


def _laid_out(verb: RowBlocks | MarlinWeight | MarlinRows, source: torch.Tensor) -> torch.Tensor:
    match verb:
        case RowBlocks():
            return _row_blocks(verb, source)
        case MarlinWeight():
            return _marlin_weight(verb, source)
        case MarlinRows():
            return _marlin_rows(verb, source)


def _row_blocks(verb: RowBlocks, source: torch.Tensor) -> torch.Tensor:
    """Swap and interleave halves, shuffle rows, cut K blocks, group units."""
    x_MK = source.reshape(verb.rows, verb.row_bytes)
    if verb.gated:
        gate, up = x_MK.chunk(2)
        x_MK = torch.stack((up, gate), dim=1).reshape(x_MK.shape)
    x_MK = x_MK.view(-1, 8, SHUFFLE_ROWS // 8, verb.row_bytes).transpose(1, 2)
    x_UMKB = x_MK.reshape(-1, verb.unit_rows, verb.row_bytes // K_BLOCK_BYTES, K_BLOCK_BYTES)
    return x_UMKB.transpose(1, 2)


def _tile_order() -> torch.Tensor:
    """Return the place in a 16x64 tile, row-major by K, of each nibble of its 128 words.

    vLLM 0.33.0, `get_weight_perm`: a thread holds the values of `mma.m16n8k16`'s B fragment for
    four 16-column blocks; the eight nibbles of a word are even ones first.
    """
    order = []
    for thread in range(32):
        column, row = thread // 4, thread % 4
        ks = (2 * row, 2 * row + 1, 2 * row + 8, 2 * row + 9)
        for block in range(4):
            word = [(k, 16 * block + column + 8 * side) for side in range(2) for k in ks]
            order += [word[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    return torch.tensor([k * MARLIN_ROWS + n for k, n in order])


def _marlin_weight(verb: MarlinWeight, source: torch.Tensor) -> torch.Tensor:
    """Take nibbles apart, put each where the tile wants it, pack them again."""
    x_MK = torch.stack((source & 15, source >> 4), dim=-1).reshape(source.shape[0], -1)
    x = x_MK.view(verb.halves, -1, MARLIN_ROWS, verb.tiles, MARLIN_TILE)
    tiles_HUT = x.permute(0, 1, 3, 4, 2).reshape(*x.shape[:2], verb.tiles, -1)[..., _tile_order()]
    packed_HUT = tiles_HUT[..., 0::2] | tiles_HUT[..., 1::2] << 4
    return packed_HUT.permute((1, 0, 2, 3) if verb.stored else (2, 0, 1, 3))


def _marlin_rows(verb: MarlinRows, source: torch.Tensor) -> torch.Tensor:
    """Recode, transpose, permute the columns of each unit."""
    if verb.power_bytes:
        dtype = torch.float32 if verb.power_bytes == torch.float32.itemsize else torch.bfloat16
        source = source.contiguous().view(dtype).to(torch.float8_e8m0fnu).view(torch.uint8)
    if verb.recode:
        tables = torch.tensor([list(table) for table in verb.recode], dtype=torch.uint8)
        halves = source.reshape(verb.halves, -1).long()
        source = tables.gather(1, halves)
    items = source.reshape(verb.halves, -1, MARLIN_ROWS, verb.groups, verb.item_bytes)
    single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    order = [i + 8 * j for i in range(8) for j in range(8)]
    if verb.order != "wide":
        order = single + [32 + place for place in single]
    if verb.order != "bias":
        order = [order[4 * (i // 4) + (0, 2, 1, 3)[i % 4]] for i in range(MARLIN_ROWS)]
    x_HUNG = items[:, :, order]
    return x_HUNG.permute((1, 0, 3, 2, 4) if verb.stored else (3, 0, 1, 2, 4))
