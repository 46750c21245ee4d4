"""What every FP4 Marlin layout does (16-bit activations); its rows are in `rows`.

Mirrors vLLM 0.33.0, `marlin_utils_fp4`: `prepare_nvfp4_moe_layer_for_marlin` (NVFP4),
`prepare_moe_mxfp4_layer_for_marlin` (MXFP4, gpt-oss), `prepare_moe_fp4_layer_for_marlin`
(compressed-tensors MXFP4, which pads nothing); and SGLang 0.5.23, functions of the same names.

Engine's order, with N padded rows a projection, g fused projections, G scale groups:
w13 I32 `[E, H/16, g 2N]`, its scales `[E, H/G, g N]`; w2 I32 `[E, N/16, 2H]`, scales `[E, N/G, H]`.
Rows stay `[gate; up]`, or in pairs for gpt-oss under vLLM (N = 2I, g = 1).

Stored order: w13 `[E, N/64, g, H/16, 128]`, scales `[E, N/64, g, H/G, 64]`, biases
`[E, N/64, g, 64]`; w2 as above. N is padded to whole 64-row units and no further.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from moeconv.layouts.marlin.outputs import SAFETENSORS, Fused, bias, weight
from moeconv.layouts.marlin.placing import is_unit_major, placed_columns, placed_rows
from moeconv.layouts.marlin.survey import ScaleRule
from moeconv.layouts.verbs import (
    MARLIN_ROWS,
    GlobalScale,
    MarlinRows,
    Verb,
)
from moeconv.tensors import TensorSpec, round_up

_GLOBAL_EXPONENT: Final = {"bfloat16": 126 - 7, "float16": 14 - 7}
"""vLLM 0.33.0 and SGLang 0.5.23, `nvfp4_marlin_process_global_scale`."""

_NO_FACTS: Final = Facts((1.0, 1.0), scales=0, flushed=0, negative=0, differing=0)


@dataclass(frozen=True, slots=True)
class MarlinFp4:
    """One Marlin layout.

    Attributes
    ----------
    group
        Values a block scale covers.
    scale_dtype
        Of the block scales as the engine holds them.
    keeps_pairs
        Gate and up rows stay in pairs.
    uneven
        A rank's slice is a whole number of 32-blocks, so that ranks may differ (gpt-oss).
    hidden_pad, pad, plain_pad, wide_pad
        What the engine pads H to, and a rank's I: gated, non-gated, and gated where H is no
        multiple of 128. 1 pads nothing.
    hidden_unit, rank_unit
        What H, and a rank's I, must be multiples of, since the engine does not pad them.
    gated_only
        The engine's method takes gated experts only.
    bias
        Suffix of the bias parameters, empty where there are none.
    has_globals
        There is a global scale beside the block scales (NVFP4).
    takes_factor
        A power of two is taken out of a layer's block scales, and what stays small is flushed.
    reconciles
        Fold the larger of two global scales into both halves, instead of the engine's way.
    """

    id: str
    engines: tuple[Engine, ...]
    schemes: tuple[str, ...]
    group: int
    scale_dtype: str
    command: str = "marlin-fp4"
    version: int = 1
    dtype: str = "bfloat16"
    leaves: tuple[str, ...] = ("bf16", "fp16", "fp8-block", "fp8")
    keeps_pairs: bool = False
    uneven: bool = False
    hidden_pad: int = 1
    pad: int = 128
    plain_pad: int = 128
    wide_pad: int = 128
    hidden_unit: int = 32
    rank_unit: int = 32
    gated_only: bool = True
    bias: str = ""
    has_globals: bool = False
    takes_factor: bool = False
    global_dtype: str = "F32"
    reconciles: bool = False

    @property
    def orders(self) -> tuple[Order, ...]:
        """Pairs stay pairs, so that a source in halves would be another matrix."""
        return ("pairs",) if self.keeps_pairs else ("halves", "pairs")

    def refusal(self, geometry: Geometry) -> str | None:
        """Refuse sizes and kinds that the engine's Marlin path does not take."""
        if geometry.hidden % self.hidden_unit:
            unit = self.hidden_unit
            return f"the hidden size must be a multiple of {unit}, found {geometry.hidden}"
        if geometry.intermediate % self.group:
            size = geometry.intermediate
            return f"the intermediate size must be a multiple of {self.group}, found {size}"
        if self.gated_only and not geometry.gated:
            return "the engine's method for this scheme takes gated experts only"
        if self.dtype == "float16" and not self.has_globals:
            return "serving in float16 would change 214 of the 256 scale bytes; serve in bfloat16"
        return None

    def tp_refusal(self, geometry: Geometry, tp: int) -> str | None:
        """Refuse a share of the intermediate size that is not whole units."""
        reason = self.rank_refusal(geometry, tp)
        if reason or tp == 1:
            return reason
        unit = self._unit
        for rank in range(tp):
            start = self.rank_slice(geometry, tp, rank).start
            if start % unit and start < geometry.intermediate:
                return (
                    f"rank {rank} starts at {start} of the intermediate size, no multiple of {unit}"
                )
        return None

    def rank_refusal(self, geometry: Geometry, tp: int) -> str | None:
        """Refuse shares that the engine itself cannot take."""
        if geometry.intermediate % tp:
            return f"the intermediate size {geometry.intermediate} does not divide by {tp}"
        share = geometry.intermediate // tp
        if not self.uneven and share % self.rank_unit:
            unit = self.rank_unit
            return f"a rank's share of the intermediate size, {share}, is no multiple of {unit}"
        return None

    def rank_slice(self, geometry: Geometry, tp: int, rank: int) -> Slice:
        """Return the rank's share; gpt-oss cuts whole 32-blocks, so its last ranks have less.

        vLLM 0.33.0, `gpt_oss.py`, `_load_weights_mxfp4`.
        """
        size = geometry.intermediate
        share = size // tp
        if geometry.gated:
            unit = self.wide_pad if geometry.hidden % 128 else self.pad
        else:
            unit = self.plain_pad
        padded = round_up(share, unit)
        if self.uneven:
            share = round_up(-(-size // self.group), tp) // tp * self.group
        return Slice(min(share * rank, size), min(share * (rank + 1), size), padded)

    def outputs(self, geometry: Geometry, part: Slice) -> tuple[Output, ...]:
        """Return weights, block scales, global scales and biases of one expert."""
        names = self._projections(geometry)
        width = 2 if self.keeps_pairs else 1
        rows = (part.padded or round_up(part.size, self._unit)) * width
        inner = part.padded or round_up(part.size, self._unit)
        hidden = round_up(geometry.hidden, self.hidden_pad)
        w13, w2 = Fused(names, rows, hidden), Fused(("down",), hidden, inner)
        outputs: tuple[Output, ...] = (
            weight("w13_weight", w13, stored=part.stored),
            self._scale("w13_weight_scale", w13, geometry, stored=part.stored),
            weight("w2_weight", w2, stored=False),
            self._scale("w2_weight_scale", w2, geometry, stored=False),
        )
        if self.has_globals:
            outputs += (
                self._global("w13_weight_scale_2", names, reciprocal=geometry.reciprocal),
                self._global("w2_weight_scale_2", w2.names, reciprocal=geometry.reciprocal),
            )
        if self.bias:
            blank = part.start > 0  # vLLM 0.33.0, gpt_oss.py: only rank 0 adds the bias of w2
            dtype = SAFETENSORS[self.dtype]
            outputs += (
                bias(f"w13_{self.bias}", w13, dtype, stored=part.stored),
                bias(f"w2_{self.bias}", w2, dtype, stored=False, blank=blank),
            )
        return outputs

    def surveyed(self, geometry: Geometry, part: Slice) -> tuple[Matrix, ...]:
        """Return all scales where there are global ones, and block scales that are floats."""
        if not self.has_globals and geometry.scale_bytes == 1:
            return ()
        gate_up, down = self._projections(geometry), geometry.hidden
        inner, width = geometry.hidden // self.group, geometry.scale_bytes
        names = (*gate_up, "down") if self.has_globals else ()
        return (
            *(Matrix((name,), "weight_scale", part.size, inner * width) for name in gate_up),
            Matrix(("down",), "weight_scale", down, part.size // self.group * width),
            *(Matrix((name,), "global_scale", 1, 4) for name in names),
        )

    def survey(self, survey: Survey) -> Facts:
        """Choose the factors, and count what the layout will not keep."""
        if not self.has_globals:
            inexact = ((name, one) for name, some in survey.inexact.items() for one in some)
            return replace(_NO_FACTS, lossy=tuple(inexact))
        return self._scale_rule.facts(survey)

    def bind(self, output: Output, facts: Facts, expert: int) -> Verb:
        """Put the layer's factor, and the expert's ratios, into a verb."""
        factor = facts.factors[0 if output.param.startswith("w13") else 1]
        match output.verb:
            case GlobalScale() as verb:
                return GlobalScale(
                    verb.exponent, factor, verb.dtype, verb.reciprocal, largest=verb.largest
                )
            case MarlinRows() as verb if verb.recode:
                ratios = facts.ratios[expert] if facts.ratios else (1.0,) * verb.halves
                if output.param.startswith("w2"):
                    ratios = (1.0,)
                recode = tuple(self._scale_rule.recode(factor, ratio) for ratio in ratios)
                return MarlinRows(
                    verb.rows,
                    verb.halves,
                    verb.groups,
                    verb.item_bytes,
                    verb.order,
                    stored=verb.stored,
                    recode=recode,
                )
            case verb:
                return verb

    def placements(self, geometry: Geometry, tp: int, rank: int) -> tuple[Placement, ...]:
        """Return the unit ranges of w13 and the row ranges of w2."""
        cut = self.rank_slice(geometry, tp, rank)
        stored = Slice(0, geometry.intermediate)
        pairs = zip(self.outputs(geometry, cut), self.outputs(geometry, stored), strict=True)
        return tuple(
            placed_columns(final, output, cut, self._unit)
            if is_unit_major(final)
            else placed_rows(final, output, cut, self.group, is_whole=tp == 1)
            for final, output in pairs
        )

    @property
    def _scale_rule(self) -> ScaleRule:
        """What becomes of NVFP4's scales."""
        return ScaleRule(self.dtype, self.takes_factor, self.reconciles)

    @property
    def _unit(self) -> int:
        """Values of I that a 64-row unit of w13 covers."""
        return MARLIN_ROWS // 2 if self.keeps_pairs else MARLIN_ROWS

    def _projections(self, geometry: Geometry) -> tuple[str, ...]:
        if self.keeps_pairs:
            return ("gate_up",)
        return ("gate", "up") if geometry.gated else ("up",)

    def _scale(self, param: str, fused: Fused, geometry: Geometry, *, stored: bool) -> Output:
        halves, groups = len(fused.names), fused.inner // self.group
        shape: tuple[int, ...] = (groups, halves * fused.rows)
        if stored:
            shape = (fused.rows // MARLIN_ROWS, halves, groups, MARLIN_ROWS)
        verb = MarlinRows(
            fused.rows,
            halves,
            groups,
            1,
            # the engine's groups, of which a short stored slice may hold the only one
            "wide" if round_up(fused.inner, self.pad) > self.group else "single",
            stored=stored,
            recode=(self._scale_rule.recode(1.0),) * halves if self.has_globals else (),
            power_bytes=geometry.scale_bytes if geometry.scale_bytes > 1 else 0,
        )
        return Output(
            param,
            TensorSpec(self.scale_dtype, shape),
            Matrix(fused.names, "weight_scale", fused.rows, groups * geometry.scale_bytes),
            verb,
        )

    def _global(self, param: str, names: tuple[str, ...], *, reciprocal: bool) -> Output:
        serving = SAFETENSORS[self.dtype]
        dtype = serving if self.global_dtype == "serving" else "F32"
        verb = GlobalScale(
            _GLOBAL_EXPONENT[self.dtype], 1.0, dtype, reciprocal, largest=self.reconciles
        )
        return Output(param, TensorSpec(dtype, ()), Matrix(names, "global_scale", 1, 4), verb)
