"""Row maps and recode tables on a device: uploaded once, read by every launch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch

from moeconv.kernels.marlin import inverse_table, unit_order

if TYPE_CHECKING:
    Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]

Key = TypeVar("Key", bound=Hashable)


class Tables:
    """Cached tensors of one device; safe to use from several threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._cached = functools.lru_cache(maxsize=64)(self._upload)

    def get(self, make: Callable[[Key], Array], key: Key) -> torch.Tensor:
        """Return `make(key)` on the device."""
        with self._lock:
            return self._cached(make, key)

    def _upload(self, make: Callable[[Key], Array], key: Key) -> torch.Tensor:
        there = torch.from_numpy(make(key)).to(self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other streams will read it
        return there


def unit_places(order: str) -> Array:
    """Return the position of each of a unit's 64 rows."""
    return np.argsort(unit_order(order))


def recodes(tables: tuple[bytes, ...]) -> Array:
    """Return recode tables as u8 `[tables, 256]`."""
    return np.stack([np.frombuffer(table, np.uint8) for table in tables])


def inverse_recodes(tables: tuple[bytes, ...]) -> Array:
    """Return the tables that undo `recodes`, as far as they can be undone."""
    return np.stack([inverse_table(table) for table in tables])
