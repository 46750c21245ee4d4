"""AFMoE (Trinity): vLLM 0.33.0, `afmoe.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, LayerRule, Routing

AFMOE: Final = Family(
    name="afmoe",
    model_types=("afmoe",),
    publishers=("arcee-ai",),
    layers=LayerRule(first="num_dense_layers"),
    routing=Routing(
        "sigmoid",
        scoring_keys=("score_func",),
        renormalise_keys=("route_norm",),
        renormalise_default=True,
        biased=True,
    ),
)
