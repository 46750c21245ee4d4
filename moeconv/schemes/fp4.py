"""Four-bit floating point: E2M1 values, two a byte, the low nibble first, with block scales.

NVFP4: groups of 16, FP8 E4M3 block scales, one float32 scale over them (vLLM 0.33.0, `modelopt.py`,
`ModelOptNvFp4FusedMoE`, and `compressed_tensors_moe_w4a4_nvfp4.py`, whose global scale is the
reciprocal). MXFP4: groups of 32, power-of-two scales (`mxfp4.py`; Quark's names are the same).
"""

from __future__ import annotations

from typing import Final

from moeconv.schemes.scheme import PartRow, Scheme

_BYTES: Final = ("U8", "I8", "F4")
_POWERS: Final = ("U8", "F8_E8M0")

MODELOPT_NVFP4: Final = Scheme(
    "modelopt-nvfp4",
    (
        PartRow("weight", (".weight",), _BYTES, values=2),
        PartRow("weight_scale", (".weight_scale",), ("F8_E4M3",), values=16),
        PartRow("global_scale", (".weight_scale_2",), ("F32",), axes="scalar"),
        PartRow("input_scale", (".input_scale",), ("F32",), axes="scalar", optional=True),
    ),
)
CT_NVFP4: Final = Scheme(
    "ct-nvfp4",
    (
        PartRow("weight", (".weight_packed",), _BYTES, values=2),
        PartRow("weight_scale", (".weight_scale",), ("F8_E4M3",), values=16),
        PartRow("global_scale", (".weight_global_scale",), ("F32",), axes="scalar"),
        PartRow("input_scale", (".input_global_scale",), ("F32",), axes="scalar", optional=True),
    ),
    reciprocal=True,
)
MXFP4: Final = Scheme(
    "mxfp4",
    (
        PartRow("weight", (".weight",), _BYTES, values=2),
        PartRow("weight_scale", (".weight_scale", ".scale"), _POWERS, values=32),
    ),
)
MXFP4_FLOAT: Final = Scheme(
    "mxfp4-float",
    (
        PartRow("weight", (".weight",), _BYTES, values=2),
        PartRow("weight_scale", (".weight_scale", ".scale"), ("F32", "BF16"), values=32),
    ),
)
CT_MXFP4: Final = Scheme(
    "ct-mxfp4",
    (
        PartRow("weight", (".weight_packed",), _BYTES, values=2),
        PartRow("weight_scale", (".weight_scale",), _POWERS, values=32),
    ),
)
GPTOSS_MXFP4: Final = Scheme(
    "gptoss-mxfp4",
    (
        PartRow("weight", ("_blocks",), _BYTES, values=2),
        PartRow("weight_scale", ("_scales",), _POWERS, values=32),
        PartRow("bias", ("_bias",), ("BF16",), axes="rows"),
    ),
)
