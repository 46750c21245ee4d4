"""gpt-oss: vLLM 0.33.0, `gpt_oss.py`.

Gate and up alternate. BF16 stacks are `[E, H, 2I]` and `[E, I, H]`; MXFP4 is not transposed.
The config names another activation.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import STACKED, Activation, Family, Routing, Storage

GPT_OSS: Final = Family(
    name="gpt-oss",
    model_types=("gpt_oss",),
    publishers=("openai",),
    storages=(
        Storage(STACKED.names, transposed=True, order="pairs"),
        Storage(STACKED.names, order="pairs"),
    ),
    intermediate=("intermediate_size",),
    activation=Activation(fixed="swigluoai"),
    routing=Routing(renormalise=True),
)
