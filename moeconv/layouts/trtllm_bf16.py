"""FlashInfer's TRTLLM block layout for unquantised BF16 experts.

Mirrors vLLM 0.33.0, `convert_moe_weights_to_flashinfer_trtllm_block_layout` (called by
`UnquantizedFusedMoEMethod`, backend FLASHINFER_TRTLLM). SGLang 0.5.23,
`_maybe_apply_flashinfer_trtllm_bf16_block_layout`, holds the same bytes.

Engine's order: w13 `[E, H/64, M, 64]` with `M = 2n` (gated) or `n`, w2 `[E, n/64, H, 64]`, where
`n` is padded with zeros to a multiple of 128. `[gate; up]` rows become `(up, gate)` pairs and are
shuffled within 32 rows; w2 rows are only shuffled.

Stored order: w13 `[E, M/32, H/64, 32, 64]`, w2 as above. `M` is padded to whole 32-row units and
`I` to whole K blocks, no further, so that the file does not depend on TP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeconv.layouts.layout import (
    Engine,
    Facts,
    Geometry,
    Matrix,
    Order,
    Output,
    Placement,
    Slice,
    Survey,
)
from moeconv.layouts.verbs import K_BLOCK_BYTES, SHUFFLE_ROWS, RowBlocks, Verb
from moeconv.tensors import TensorSpec, round_up

_ITEM: Final = 2
_BLOCK: Final = K_BLOCK_BYTES // _ITEM
_ENGINE_ALIGNMENT: Final = 128
"""vLLM 0.33.0, `unquantized_round_up_hidden_size_and_intermediate_size`."""


@dataclass(frozen=True, slots=True)
class TrtllmBf16:
    """The layout `trtllm-bf16`."""

    id: str = "trtllm-bf16"
    command: str = "trtllm"
    version: int = 1
    dtype: str = "bfloat16"
    schemes: tuple[str, ...] = ("bf16",)
    leaves: tuple[str, ...] = ()
    orders: tuple[Order, ...] = ("halves", "pairs")
    engines: tuple[Engine, ...] = (
        Engine("vllm", ">=0.33,<0.34", "--moe-backend flashinfer_trtllm"),
        Engine("sglang", ">=0.5.23,<0.5.24", "--moe-runner-backend flashinfer_trtllm"),
    )

    def refusal(self, geometry: Geometry) -> str | None:
        """Refuse a hidden size that is not whole K blocks."""
        if geometry.hidden % _BLOCK:
            return f"the hidden size must be a multiple of {_BLOCK}, found {geometry.hidden}"
        return None

    def tp_refusal(self, geometry: Geometry, tp: int) -> str | None:
        """Refuse a share of the intermediate size that is not whole units."""
        size = geometry.intermediate
        if size % tp:
            return f"the intermediate size {size} does not divide by {tp}"
        if tp > 1 and (size // tp) % _BLOCK:
            return (
                f"a rank's share of the intermediate size, {size // tp}, is no multiple of {_BLOCK}"
            )
        return None

    def rank_refusal(self, geometry: Geometry, tp: int) -> str | None:
        """Refuse a size that does not divide."""
        if geometry.intermediate % tp:
            return f"the intermediate size {geometry.intermediate} does not divide by {tp}"
        return None

    def rank_slice(self, geometry: Geometry, tp: int, rank: int) -> Slice:
        """Return the rank's even share."""
        share = geometry.intermediate // tp
        return Slice(share * rank, share * (rank + 1), round_up(share, _ENGINE_ALIGNMENT))

    def outputs(self, geometry: Geometry, part: Slice) -> tuple[Output, ...]:
        """Return w13 and w2 of one expert."""
        hidden, size = geometry.hidden, part.size
        projections = ("gate", "up") if geometry.gated else ("up",)
        half = part.padded or round_up(size, SHUFFLE_ROWS // len(projections))
        cols = part.padded or round_up(size, _BLOCK)
        rows = half * len(projections)
        blocks = hidden // _BLOCK
        if part.stored:
            w13 = TensorSpec("BF16", (rows // SHUFFLE_ROWS, blocks, SHUFFLE_ROWS, _BLOCK))
        else:
            w13 = TensorSpec("BF16", (blocks, rows, _BLOCK))
        return (
            Output(
                "w13_weight",
                w13,
                Matrix(projections, "weight", half, hidden * _ITEM),
                RowBlocks(
                    rows,
                    hidden * _ITEM,
                    gated=geometry.gated,
                    unit_rows=SHUFFLE_ROWS if part.stored else rows,
                ),
            ),
            Output(
                "w2_weight",
                TensorSpec("BF16", (cols // _BLOCK, hidden, _BLOCK)),
                Matrix(("down",), "weight", hidden, cols * _ITEM),
                RowBlocks(hidden, cols * _ITEM, gated=False, unit_rows=hidden),
            ),
        )

    def surveyed(self, geometry: Geometry, part: Slice) -> tuple[Matrix, ...]:
        """Return nothing: no byte depends on another's value."""
        return ()

    def survey(self, survey: Survey) -> Facts:
        """Return that nothing is lost."""
        return Facts((1.0, 1.0), scales=0, flushed=0, negative=0, differing=0)

    def bind(self, output: Output, facts: Facts, expert: int) -> Verb:
        """Return the verb as it is."""
        return output.verb

    def placements(self, geometry: Geometry, tp: int, rank: int) -> tuple[Placement, ...]:
        """Return the unit range of w13 and the K-block range of w2."""
        cut = self.rank_slice(geometry, tp, rank)
        final = self.outputs(geometry, cut)
        halves = 2 if geometry.gated else 1
        blocks = geometry.hidden // _BLOCK
        units = _share(halves * cut.start, halves * cut.stop, SHUFFLE_ROWS)
        unit_bytes = blocks * SHUFFLE_ROWS * K_BLOCK_BYTES
        k_blocks = _share(cut.start, cut.stop, _BLOCK)
        return (
            Placement(
                "w13_weight",
                final[0].spec,
                units.start * unit_bytes,
                units.stop * unit_bytes,
                stored=(len(units), blocks),
                axes=(1, 0),
                final=(blocks, final[0].matrix.shape[0] // SHUFFLE_ROWS),
                item_bytes=SHUFFLE_ROWS * K_BLOCK_BYTES,
            ),
            Placement(
                "w2_weight",
                final[1].spec,
                k_blocks.start * geometry.hidden * K_BLOCK_BYTES,
                k_blocks.stop * geometry.hidden * K_BLOCK_BYTES,
                stored=(len(k_blocks),),
                axes=(0,),
                final=final[1].spec.shape[:1],
                item_bytes=geometry.hidden * K_BLOCK_BYTES,
            ),
        )


def _share(start: int, stop: int, unit: int) -> range:
    """Return the units that `[start, stop)` covers; only a last one may be part filled."""
    return range(start // unit, round_up(stop, unit) // unit)
