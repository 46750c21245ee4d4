"""What bytes does the engine want, and which of them does a rank own?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from moeconv.errors import UnsupportedError
from moeconv.layouts.marlin.layout import MarlinFp4
from moeconv.layouts.marlin.rows import MARLIN_FP4
from moeconv.layouts.trtllm_bf16 import TrtllmBf16

if TYPE_CHECKING:
    from moeconv.layouts.layout import Layout

TRTLLM_BF16: Final = TrtllmBf16()

LAYOUTS: Final[tuple[Layout, ...]] = (
    TRTLLM_BF16,
    *MARLIN_FP4,
)


DTYPES: Final = ("bfloat16", "float16")
"""Serving dtypes."""


def find_layout(name: str, dtype: str = "bfloat16", *, reconciles: bool = False) -> Layout | None:
    """Return the layout `name` for a serving dtype; `None` if there is none."""
    for layout in LAYOUTS:
        if layout.id == name:
            if dtype not in DTYPES:
                return None
            if isinstance(layout, MarlinFp4):
                return replace(layout, dtype=dtype, reconciles=reconciles)
            return layout
    return None


def named_layout(name: str) -> Layout:
    """Return the layout `name`.

    Raises
    ------
    UnsupportedError
        There is none.
    """
    layout = find_layout(name)
    if layout is None:
        message = f"`{name}` is no layout that moeconv knows"
        of_command = [layout.id for layout in LAYOUTS if layout.command == name]
        what = f"layouts of `moeconv {name}`" if of_command else "known layouts"
        known = ", ".join(of_command or [layout.id for layout in LAYOUTS])
        raise UnsupportedError(message, hint=f"{what}: {known}")
    return layout
