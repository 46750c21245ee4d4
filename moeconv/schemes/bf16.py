"""BF16 weights without scales."""

from __future__ import annotations

from typing import Final

from moeconv.schemes.scheme import PartRow, Scheme

BF16: Final = Scheme("bf16", (PartRow("weight", (".weight", ""), ("BF16",)),))
