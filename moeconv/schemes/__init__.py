"""Which tensors make one matrix?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moeconv.schemes.bf16 import BF16
from moeconv.schemes.fp4 import CT_MXFP4, CT_NVFP4, GPTOSS_MXFP4, MODELOPT_NVFP4, MXFP4, MXFP4_FLOAT
from moeconv.schemes.recognised import FP8_BLOCK, FP8_TENSOR, FP16, FP32, INT4_PACKED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moeconv.schemes.scheme import Scheme

SCHEMES: Final[tuple[Scheme, ...]] = (
    BF16,
    MODELOPT_NVFP4,
    CT_NVFP4,
    MXFP4,
    MXFP4_FLOAT,
    CT_MXFP4,
    GPTOSS_MXFP4,
    FP16,
    FP32,
    FP8_BLOCK,
    FP8_TENSOR,
    INT4_PACKED,
)


def detect(found: Mapping[str, str]) -> Scheme | None:
    """Return the scheme whose parts are exactly those of one matrix.

    Parameters
    ----------
    found
        Suffix to dtype, for every tensor of one projection.
    """
    return next((scheme for scheme in SCHEMES if _fits(scheme, found)), None)


def _fits(scheme: Scheme, found: Mapping[str, str]) -> bool:
    left = dict(found)
    for row in scheme.parts:
        suffix = next((suffix for suffix in row.suffixes if suffix in left), None)
        if suffix is None:
            if not row.optional:
                return False
        elif left.pop(suffix) not in row.dtypes:
            return False
    return not left
