"""Kimi-Linear and Kimi-K3: vLLM 0.33.0, `vllm/models/kimi_k3/nvidia/model.py`.

Latent MoE runs the experts on a smaller hidden size.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import W1_W3_W2, Family, LayerRule, Routing

KIMI_LINEAR: Final = Family(
    name="kimi-linear",
    model_types=("kimi_linear", "kimi_k3"),
    publishers=("moonshotai",),
    modules=("block_sparse_moe.experts",),
    storages=(W1_W3_W2,),
    layers=LayerRule(first="first_k_dense_replace", period="moe_layer_freq"),
    hidden=("routed_expert_hidden_size", "hidden_size"),
    routing=Routing(
        "sigmoid",
        scoring_keys=("moe_router_activation_func",),
        renormalise_keys=("moe_renormalize",),
    ),
)
