"""What does this model call its experts?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moeconv.families.granite_moe import GRANITE_MOE
from moeconv.families.llama4 import LLAMA4
from moeconv.families.nemotron_h import NEMOTRON_H
from moeconv.families.qwen_moe import QWEN_MOE

if TYPE_CHECKING:
    from moeconv.families.family import Family

FAMILIES: Final[tuple[Family, ...]] = (
    GRANITE_MOE,
    LLAMA4,
    NEMOTRON_H,
    QWEN_MOE,
)
