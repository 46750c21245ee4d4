"""Step3: vLLM 0.33.0, `step3_text.py`.

Gate, up and down are three stacks in the MoE module itself, beside its router.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import STACKED_GATE_UP_DOWN, Family, LayerRule, Routing

STEP3: Final = Family(
    name="step3",
    model_types=("step3_vl", "step3_text"),
    publishers=("stepfun-ai",),
    modules=("moe",),
    owns_module=False,
    storages=(STACKED_GATE_UP_DOWN,),
    layers=LayerRule(moe_list="moe_layers_enum", first_default=1),
    experts=("moe_num_experts",),
    intermediate=("moe_intermediate_size",),
    routing=Routing(renormalise_keys=("norm_expert_weight",), renormalise_default=False),
)
