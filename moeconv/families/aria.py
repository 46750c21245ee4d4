"""Aria: vLLM 0.33.0, `aria.py`.

Stacks are `[E, H, 2I]` and `[E, I, H]`. The config's activation is the shared experts'.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Activation, Family, Routing, Storage

ARIA: Final = Family(
    name="aria",
    model_types=("aria", "aria_text"),
    publishers=("rhymes-ai",),
    storages=(Storage((("gate_up", "fc1"), ("down", "fc2")), transposed=True),),
    experts=("moe_num_experts",),
    intermediate=("intermediate_size",),
    activation=Activation(fixed="silu"),
    routing=Routing(renormalise=True),
)
