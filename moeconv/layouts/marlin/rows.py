"""The FP4 Marlin layouts: a row for each engine and source.

What an engine pads, and what it asks of sizes, are facts of vLLM 0.33.0 (`marlin_utils_fp4`,
`mxfp4_round_up_hidden_size_and_intermediate_size`) and SGLang 0.5.23 (`marlin_utils_fp4`,
`Mxfp4MoEMethod.create_weights`).
"""

from __future__ import annotations

from typing import Final

from moeconv.layouts.layout import Engine
from moeconv.layouts.marlin.layout import MarlinFp4

_VLLM: Final = (Engine("vllm", ">=0.33,<0.34", "--moe-backend marlin"),)
_SGLANG: Final = (Engine("sglang", ">=0.5.23,<0.5.24", "--moe-runner-backend marlin"),)

MARLIN_FP4: Final = (
    MarlinFp4(
        id="marlin-nvfp4",
        engines=_VLLM,
        schemes=("modelopt-nvfp4", "ct-nvfp4"),
        group=16,
        scale_dtype="F8_E4M3",
        pad=64,
        plain_pad=64,
        wide_pad=128,
        hidden_unit=64,
        rank_unit=16,
        gated_only=False,
        has_globals=True,
        takes_factor=True,
    ),
    MarlinFp4(
        id="marlin-nvfp4-sglang",
        engines=_SGLANG,
        schemes=("modelopt-nvfp4", "ct-nvfp4"),
        group=16,
        scale_dtype="F8_E4M3",
        pad=1,
        plain_pad=128,
        wide_pad=1,
        hidden_unit=64,
        rank_unit=64,
        gated_only=False,
        has_globals=True,
        global_dtype="serving",
    ),
    MarlinFp4(
        id="marlin-mxfp4-ct",
        engines=_VLLM,
        schemes=("ct-mxfp4",),
        group=32,
        scale_dtype="F8_E8M0",
        pad=1,
        wide_pad=1,
        hidden_unit=64,
        rank_unit=64,
    ),
    MarlinFp4(
        id="marlin-mxfp4",
        engines=_VLLM,
        schemes=("mxfp4", "mxfp4-float", "ct-mxfp4"),
        group=32,
        scale_dtype="F8_E8M0",
        hidden_pad=256,
    ),
    MarlinFp4(
        id="marlin-mxfp4-gptoss",
        engines=_VLLM,
        schemes=("gptoss-mxfp4",),
        group=32,
        scale_dtype="F8_E8M0",
        keeps_pairs=True,
        uneven=True,
        hidden_pad=256,
        bias="bias",
    ),
    MarlinFp4(
        id="marlin-mxfp4-gptoss-sglang",
        engines=_SGLANG,
        schemes=("gptoss-mxfp4",),
        group=32,
        scale_dtype="F8_E8M0",
        uneven=True,
        hidden_pad=256,
        bias="weight_bias",
    ),
)
"""Every Marlin layout of FP4 experts."""
