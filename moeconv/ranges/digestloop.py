"""XXH3-128 of many rows in one call, by the code of the `xxhash` package.

Imported where they are many: numba takes its time. A thread that asks for one digest gives the
interpreter's lock up, and waits for it again behind all others.
"""

from __future__ import annotations

import ctypes
import platform
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, TypeAlias

import llvmlite.binding
import numpy as np
import xxhash
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from moeconv.compiling import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moeconv.ranges.rows import Numbers

    Words: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

_NAMES: Final = ("XXH3_128bits_dispatch", "XXH3_128bits")
"""The function that uses all of an x86 processor, and that of any processor."""

_MACHINES: Final = frozenset({"x86_64", "aarch64"})
"""Where C and LLVM return two words alike: in two registers."""

_SYMBOL: Final = "moeconv_xxh3_128bits"
_WORD: Final = ir.IntType(64)


@intrinsic
def _xxh3(_typing: object, _address: object, _size: object) -> object:
    """Return the low and the high word of a digest; numba has no call of what returns a struct."""

    def call(
        _context: object, builder: ir.IRBuilder, _signature: object, arguments: Sequence[ir.Value]
    ) -> ir.Value:
        kind = ir.FunctionType(ir.ArrayType(_WORD, 2), (_WORD, _WORD))
        known = builder.module.globals.get(_SYMBOL)
        return builder.call(known or ir.Function(builder.module, kind, _SYMBOL), arguments)

    return types.UniTuple(types.uint64, 2)(types.uintp, types.uintp), call


@compiled
def _digest(addresses: Numbers, sizes: Numbers, out: Words) -> None:
    """Fill `out` `[n, 2]` with the high and the low word of each digest."""
    for i in range(len(sizes)):
        out[i, 1], out[i, 0] = _xxh3(addresses[i], sizes[i])


def digests_at(addresses: Numbers, sizes: Numbers) -> list[str]:
    """Return the digests of ranges of memory."""
    words = np.empty((len(sizes), 2), np.uint64)
    _digest(addresses, sizes, words)
    text = words.astype(">u8").tobytes().hex()
    return [text[at : at + 32] for at in range(0, len(text), 32)]


def is_there() -> bool:
    """Find the function in the package's library, and say whether it gives what the package does.

    Builds of the package differ in what their library shows.
    """
    spec = find_spec("xxhash._xxhash")
    if spec is None or platform.machine() not in _MACHINES:
        return False
    library = ctypes.CDLL(spec.origin)
    shown = [getattr(library, name) for name in _NAMES if hasattr(library, name)]
    if not shown:
        return False
    llvmlite.binding.add_symbol(_SYMBOL, ctypes.cast(shown[0], ctypes.c_void_p).value)
    probe = np.arange(256, dtype=np.uint8)
    found = digests_at(np.array([probe.ctypes.data]), np.array([probe.nbytes]))
    return found == [xxhash.xxh3_128_hexdigest(probe)]
