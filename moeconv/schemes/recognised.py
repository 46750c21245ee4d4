"""Schemes that are recognised so that they can be refused by name, with what to do instead."""

from __future__ import annotations

from typing import Final

from moeconv.schemes.scheme import PartRow, Scheme

_WEIGHT: Final = (".weight", "")

FP16: Final = Scheme(
    "fp16",
    (PartRow("weight", _WEIGHT, ("F16",)),),
    advice="save the checkpoint in bfloat16 first; moeconv moves bytes and never casts",
)
FP32: Final = Scheme(
    "fp32",
    (PartRow("weight", _WEIGHT, ("F32",)),),
    advice="save the checkpoint in bfloat16 first; moeconv moves bytes and never casts",
)
FP8_BLOCK: Final = Scheme(
    "fp8-block",
    (
        PartRow("weight", _WEIGHT, ("F8_E4M3",)),
        PartRow("weight_scale", (".weight_scale_inv",), ("F32", "F8_E8M0"), values=128),
    ),
    advice=(
        "DeepSeek-V3, Kimi-K2 and MiniMax-M2 are published so; take a BF16 export of the model, "
        "or an NVFP4 one for `moeconv marlin-fp4`"
    ),
)
FP8_TENSOR: Final = Scheme(
    "fp8",
    (
        PartRow("weight", _WEIGHT, ("F8_E4M3",)),
        PartRow("weight_scale", (".weight_scale",), ("F32", "BF16"), axes="scalar", optional=True),
        PartRow("input_scale", (".input_scale",), ("F32", "BF16"), axes="scalar", optional=True),
    ),
    advice="take a BF16 export of the model, or an NVFP4 one for `moeconv marlin-fp4`",
)
INT4_PACKED: Final = Scheme(
    "int4-packed",
    (
        PartRow("weight", (".weight_packed",), ("I32",), values=8),
        PartRow("weight_scale", (".weight_scale",), ("BF16", "F16", "F32"), values=32),
        PartRow("weight_shape", (".weight_shape",), ("I32", "I64"), axes="scalar", optional=True),
    ),
    advice="take a BF16 export of the model",
)
