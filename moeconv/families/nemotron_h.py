"""Nemotron-H: vLLM 0.33.0, `nemotron_h.py`, `NemotronHModel.load_weights`.

Experts are not gated (relu2): up and down only. Latent MoE runs them on a smaller hidden size.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import STACKED_UP_DOWN, UP_DOWN, Family, LayerRule

NEMOTRON_H: Final = Family(
    name="nemotron-h",
    model_types=("nemotron_h",),
    prefixes=(
        "backbone.layers.{layer}.mixer.experts",
        "model.layers.{layer}.mixer.experts",
    ),
    storages=(UP_DOWN, STACKED_UP_DOWN),
    layers=LayerRule(pattern=("layers_block_type", "hybrid_override_pattern")),
    experts=("n_routed_experts",),
    hidden=("moe_latent_size", "hidden_size"),
    activation=("mlp_hidden_act",),
    gated=False,
)
