"""DeepSeek-V4: vLLM 0.33.0, `vllm/models/deepseek_v4/nvidia/model.py`.

Every layer has experts; the first ones choose theirs by a table of token ids.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import W1_W3_W2, Family, Routing

DEEPSEEK_V4: Final = Family(
    name="deepseek-v4",
    model_types=("deepseek_v4", "deepseek_v41"),
    publishers=("deepseek-ai",),
    modules=("ffn.experts",),
    storages=(W1_W3_W2,),
    routing=Routing("sqrtsoftplus", scoring_keys=("scoring_func",), renormalise=True),
)
