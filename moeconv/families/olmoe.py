"""OLMoE and FlexOlmo: vLLM 0.33.0, `olmoe.py`."""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, Routing

OLMOE: Final = Family(
    name="olmoe",
    model_types=("olmoe", "flex_olmo"),
    publishers=("allenai",),
    intermediate=("intermediate_size",),
    routing=Routing(renormalise_default=False),
)
