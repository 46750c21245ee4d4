"""Llama 4: vLLM 0.33.0, `llama4.py`, `Llama4Model.load_moe_expert_weights`.

BF16 stacks are `[E, H, 2I]` and `[E, I, H]`.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import GATE_UP_DOWN, STACKED_TRANSPOSED, Family, LayerRule, Routing

LLAMA4: Final = Family(
    name="llama4",
    model_types=("llama4", "llama4_text"),
    publishers=("meta-llama",),
    modules=("feed_forward.experts",),
    storages=(STACKED_TRANSPOSED, GATE_UP_DOWN),
    layers=LayerRule(moe_list="moe_layers", step="interleave_moe_layer_step"),
    intermediate=("intermediate_size",),
    routing=Routing("sigmoid", renormalise=False, custom="top-1, weighs the expert's input"),
)
