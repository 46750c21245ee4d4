"""Qwen3.5-MoE: vLLM 0.33.0, `qwen3_5.py`.

Published as stacks `[E, 2I, H]` in BF16 and an expert a tensor when quantised, which is also how
transformers 5.24 writes it back.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import GATE_UP_DOWN, STACKED, Family, Routing

QWEN3_5_MOE: Final = Family(
    name="qwen3.5-moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    publishers=("Qwen",),
    storages=(STACKED, GATE_UP_DOWN),
    routing=Routing(renormalise=True),
)
