"""Nemotron-H: vLLM 0.33.0, `nemotron_h.py`, `NemotronHModel.load_weights`.

Experts are not gated: up and down only. Latent MoE runs them on a smaller hidden size. Puzzle
variants have other sizes in each layer.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import STACKED_UP_DOWN, UP_DOWN, Activation, Family, LayerRule, Routing

NEMOTRON_H: Final = Family(
    name="nemotron-h",
    model_types=("nemotron_h", "nemotron_h_puzzle"),
    publishers=("nvidia",),
    roots=("backbone.layers.{layer}", "model.layers.{layer}"),
    modules=("mixer.experts",),
    storages=(UP_DOWN, STACKED_UP_DOWN),
    layers=LayerRule(pattern=("layers_block_type", "hybrid_override_pattern", "block_configs")),
    layer_count=(
        "num_hidden_layers",
        "layers_block_type",
        "hybrid_override_pattern",
        "block_configs",
    ),
    layer_configs="block_configs",
    experts=("n_routed_experts",),
    hidden=("moe_latent_size", "hidden_size"),
    activation=Activation(keys=("mlp_hidden_act",), default="relu2"),
    routing=Routing("sigmoid", biased=True),
    gated=False,
)
