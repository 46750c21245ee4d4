"""Verbs on a GPU, in torch integer operations and indexing.

Bytes go up, are moved there and come back, on one stream a calling thread, so that the copies of
one expert overlap the work on another. Host buffers are pinned.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from moeconv.errors import UnsupportedError
from moeconv.kernels.marlin import inverse_table, row_index
from moeconv.kernels.rowmaps import block_index, inverse_block_index
from moeconv.kernels.scalars import global_scale, power_bytes, source_powers
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
    from moeconv.tensors import Bytes


class CudaKernels:
    """Satisfies `layouts.verbs.Kernels` on one CUDA device.

    Raises
    ------
    UnsupportedError
        Torch sees no such device.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        if self._device.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if (self._device.index or 0) >= count:
                message = f"there is no device `{device}`: torch {torch.__version__} sees {count}"
                raise UnsupportedError(message, hint="use `--device cpu`; it writes the same bytes")
        self._local = threading.local()
        self._lock = threading.Lock()
        self._cached = functools.lru_cache(maxsize=64)(self._upload)

    @property
    def device(self) -> str:
        """The device, as torch names it."""
        return str(self._device)

    def empty(self, nbytes: int) -> Bytes:
        """Return a pinned host buffer."""
        pin = self._device.type == "cuda"
        return np.asarray(torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin).numpy())

    def lay_out(self, verb: Verb, source: Bytes, out: Bytes) -> None:
        """Fill `out`."""
        if isinstance(verb, MarlinRows) and verb.power_bytes:
            verb, source = replace(verb, power_bytes=0), power_bytes(verb, source)
        self._run(verb, source, out, inverse=False)

    def invert(self, verb: Verb, stored: Bytes, source: Bytes) -> None:
        """Fill `source`."""
        if isinstance(verb, MarlinRows) and verb.power_bytes:
            exponents = np.empty((source.shape[0], verb.groups), np.uint8)
            self._run(replace(verb, power_bytes=0), stored, exponents, inverse=True)
            source_powers(verb, exponents, source)
        elif not isinstance(verb, GlobalScale):
            self._run(verb, stored, source, inverse=True)

    def _run(self, verb: Verb, given: Bytes, wanted: Bytes, *, inverse: bool) -> None:
        if isinstance(verb, GlobalScale):
            global_scale(verb, given, wanted)
            return
        host = torch.from_numpy(given.reshape(-1)), torch.from_numpy(wanted.reshape(-1))
        if self._device.type != "cuda":
            host[1].copy_(self._moved(verb, host[0], inverse=inverse))
            return
        stream = self._stream()
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            there = host[0].to(self._device, non_blocking=True)
            host[1].copy_(self._moved(verb, there, inverse=inverse), non_blocking=True)
        stream.synchronize()

    def _moved(self, verb: Verb, x: torch.Tensor, *, inverse: bool) -> torch.Tensor:
        match verb:
            case RowBlocks():
                items = x.view(torch.int64).view(-1, K_BLOCK_BYTES // 8)
                moved = items.index_select(0, self._index(verb, inverse=inverse))
                return moved.view(torch.uint8).view(-1)
            case MarlinWeight():
                return _unrepack(verb, x) if inverse else _repack(verb, x)
            case MarlinRows():
                return self._rows(verb, x, inverse=inverse)
            case GlobalScale():
                return x

    def _rows(self, verb: MarlinRows, x: torch.Tensor, *, inverse: bool) -> torch.Tensor:
        items = x.view(torch.int16) if verb.item_bytes > 1 else x
        index = self._index(verb, inverse=False)
        if not inverse:
            return self._recoded(verb, items, inverse=False)[index].view(torch.uint8)
        moved = torch.empty_like(items)
        moved[index] = items
        return self._recoded(verb, moved, inverse=True).view(torch.uint8)

    def _recoded(self, verb: MarlinRows, items: torch.Tensor, *, inverse: bool) -> torch.Tensor:
        if not verb.recode:
            return items
        tables = self._tables(verb.recode, inverse=inverse)
        halves = items.view(verb.halves, -1)
        return torch.cat([tables[i][half.int()] for i, half in enumerate(halves)])

    def _index(self, verb: RowBlocks | MarlinRows, *, inverse: bool) -> torch.Tensor:
        with self._lock:
            return self._cached(verb, inverse)

    def _tables(self, recode: tuple[bytes, ...], *, inverse: bool) -> torch.Tensor:
        with self._lock:
            return self._cached(recode, inverse)

    def _upload(
        self,
        what: RowBlocks | MarlinRows | tuple[bytes, ...],
        inverse: bool,  # noqa: FBT001
    ) -> torch.Tensor:
        match what:
            case RowBlocks():
                array = inverse_block_index(what) if inverse else block_index(what)
                there = torch.from_numpy(array).to(self._device)
            case MarlinRows():
                there = torch.from_numpy(row_index(what)).to(self._device)
            case _:
                rows = [inverse_table(t) if inverse else np.frombuffer(t, np.uint8) for t in what]
                there = torch.from_numpy(np.stack(rows)).to(self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return there

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)
        stream: torch.cuda.Stream = self._local.stream
        return stream


def _shapes(verb: MarlinWeight) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return source and packed shapes in 32-bit words, and the axes from packed to `[h, u, t]`."""
    units = verb.rows // MARLIN_ROWS
    source = (verb.halves, units, 4, 2, 8, verb.tiles, 2)  # [h, u, j, row or row + 8, c, tile, AB]
    if verb.stored:
        return source, (units, verb.halves, verb.tiles, 8, 4, 4), (1, 0, 2)
    return source, (verb.tiles, verb.halves, units, 8, 4, 4), (1, 2, 0)


def _repack(verb: MarlinWeight, x: torch.Tensor) -> torch.Tensor:
    """Repack as `kernels.marlin` describes it; half rows of a tile are the elements."""
    source, packed, axes = _shapes(verb)
    words = x.view(torch.int32).view(source)
    a, b = words[..., 0], words[..., 1]
    low = (a & 0x0F0F0F0F) | ((b & 0x0F0F0F0F) << 4)
    high = ((a >> 4) & 0x0F0F0F0F) | (b & -0x0F0F0F10)
    rows = [low[:, :, :, 0], low[:, :, :, 1], high[:, :, :, 0], high[:, :, :, 1]]
    _transpose(rows)
    out = torch.empty(packed, dtype=torch.int32, device=x.device)  # [.., c, t, j]
    target = out.permute(*axes, 3, 4, 5)  # [h, u, tile, c, t, j]
    for t, row in enumerate(rows):  # row: [h, u, j, c, tile]
        target[:, :, :, :, t].copy_(row.permute(0, 1, 4, 3, 2))
    return out.view(torch.uint8).view(-1)


def _unrepack(verb: MarlinWeight, x: torch.Tensor) -> torch.Tensor:
    """Undo `_repack`."""
    source, packed, axes = _shapes(verb)
    target = x.view(torch.int32).view(packed).permute(*axes, 3, 4, 5)
    rows = [target[:, :, :, :, t].permute(0, 1, 4, 3, 2).contiguous() for t in range(4)]
    _transpose(rows)
    words = torch.empty(source, dtype=torch.int32, device=x.device)
    for side in range(2):
        low, high = rows[side], rows[2 + side]
        words[:, :, :, side, ..., 0] = (low & 0x0F0F0F0F) | ((high & 0x0F0F0F0F) << 4)
        words[:, :, :, side, ..., 1] = ((low >> 4) & 0x0F0F0F0F) | (high & -0x0F0F0F10)
    return words.view(torch.uint8).view(-1)


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
