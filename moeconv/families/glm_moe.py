"""GLM-4.5 to GLM-5: vLLM 0.33.0, `glm4_moe.py`, `glm4_moe_lite.py`, `vllm/models/glm5next`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, LayerRule, Routing

GLM_MOE: Final = Family(
    name="glm-moe",
    model_types=(
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe",
        "glm4v_moe_text",
        "glm_moe_dsa",
        "glm5_next",
        "glm5_next_text",
    ),
    publishers=("zai-org",),
    layers=LayerRule(first="first_k_dense_replace"),
    routing=Routing("sigmoid", scoring_keys=("scoring_func",), biased=True),
)
