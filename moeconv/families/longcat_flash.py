"""LongCat-Flash: vLLM 0.33.0, `longcat_flash.py`.

A layer has two attentions, so a count of attentions would be twice the layers. Zero experts pass
their input through; transformers 5.24 writes unused gates and ups for them.
"""

from __future__ import annotations

from typing import Final

from moeconv.families.family import Family, Routing

LONGCAT_FLASH: Final = Family(
    name="longcat-flash",
    model_types=("longcat_flash",),
    publishers=("meituan-longcat",),
    layer_count=("num_layers", "num_hidden_layers"),
    experts=("n_routed_experts",),
    intermediate=("expert_ffn_hidden_size",),
    surplus="zero_expert_num",
    routing=Routing(renormalise=False, biased=True),
)
