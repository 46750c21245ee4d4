"""How does each engine go about its experts? A row for each layout, beside the layouts' own.

This is a second recipe, for the witness: it follows the engines' words, and uses nothing of what a
layout says of itself but its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from moeconv.checkpoint.reader import Reader
    from moeconv.planning.jobs import Converted
    from moeconv.planning.stacks import Stack
    from moeconv.tensors import Bytes

FLASHINFER: Final = "FlashInfer"
TORCH: Final = "plain torch"

FAULT: Final = (
    "layout and inverse have the same fault, or the source is another one: do not serve these "
    "files, and please report it"
)
_PARTS: Final = {
    "weight": "weight",
    "weight_scale": "weight_scale",
    "weight_scale_2": "global_scale",
    "bias": "bias",
    "weight_bias": "bias",
}
"""What of the checkpoint a parameter is made of, by its name behind `w13_` and `w2_`."""


@dataclass(frozen=True, slots=True)
class Words:
    """What an engine does to a layer's experts.

    Attributes
    ----------
    by
        Whose functions say so.
    keeps_pairs
        Rows of gate and up stay `(gate 0, up 0, …)`.
    takes_factor
        Block scales lose a power of two, and those without a normal form become zero.
    rounds
        Global scales are kept in the serving dtype.
    """

    by: str = TORCH
    keeps_pairs: bool = False
    takes_factor: bool = False
    rounds: bool = False

    def projections(self, tensor: Converted) -> tuple[str, ...]:
        """Return which matrices stand under each other in a parameter, the first on top."""
        if is_down(tensor):
            return ("down",)
        if self.keeps_pairs:
            return ("gate_up",)
        return ("gate", "up") if tensor.stack.geometry.gated else ("up",)


WORDS: Final = {
    "trtllm-bf16": Words(FLASHINFER),
    "marlin-nvfp4": Words(takes_factor=True),
    "marlin-nvfp4-sglang": Words(rounds=True),
    "marlin-mxfp4": Words(),
    "marlin-mxfp4-ct": Words(),
    "marlin-mxfp4-gptoss": Words(keeps_pairs=True),
    "marlin-mxfp4-gptoss-sglang": Words(),
}
"""By layout; one that has no row is not checked by others."""


def is_down(tensor: Converted) -> bool:
    """Say whether a parameter is of the down projection."""
    return tensor.output.param.startswith("w2_")


def part_of(tensor: Converted) -> str:
    """Return what of the checkpoint a parameter is made of."""
    return _PARTS[tensor.output.param.partition("_")[2]]


def whole_matrix(reader: Reader, stack: Stack, key: tuple[str, str], expert: int) -> Bytes:
    """Read one matrix of the source, by projection and part: all its rows, bytes a row."""
    part = stack.sources[key].part(expert)
    rows, cols = part.shape
    out = np.empty((rows, cols * part.item_bytes), np.uint8)
    begin, end = part.span
    reader.read_part(part, out, np.empty(end - begin, np.uint8))
    return out
