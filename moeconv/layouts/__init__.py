"""What bytes does the engine want, and which of them does a rank own?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moeconv.layouts.trtllm_bf16 import TrtllmBf16

if TYPE_CHECKING:
    from moeconv.layouts.layout import Layout

TRTLLM_BF16: Final = TrtllmBf16()

LAYOUTS: Final[tuple[Layout, ...]] = (TRTLLM_BF16,)
