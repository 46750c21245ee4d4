"""Step3.5 and Step3.7: vLLM 0.33.0, `step3p5.py`.

Three stacks as in Step3, or an expert a tensor where the checkpoint was quantised.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import GATE_UP_DOWN, STACKED_GATE_UP_DOWN, Family, LayerRule, Routing

STEP3P5: Final = Family(
    name="step3.5",
    model_types=("step3p5", "step3p7"),
    publishers=("stepfun-ai",),
    modules=("moe.experts", "moe"),
    owns_module=False,
    storages=(STACKED_GATE_UP_DOWN, GATE_UP_DOWN),
    layers=LayerRule(moe_list="moe_layers_enum", first_default=1),
    experts=("moe_num_experts", "n_routed_experts"),
    intermediate=("moe_intermediate_size",),
    routing=Routing(
        "sigmoid",
        scoring_keys=("moe_router_activation",),
        renormalise_keys=("norm_expert_weight",),
        renormalise_default=True,
        biased=True,
    ),
)
