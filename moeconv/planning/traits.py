"""What does an engine ask of a model, beside the bytes of its experts?

Mirrors vLLM 0.33.0, `fused_moe/config.py`, `get_routing_method_type`, and the routers that call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from moeconv.planning.modelconfig import activation, is_clamped, model_types, renormalises, scoring

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Json
    from moeconv.families.family import Family
    from moeconv.planning.stacks import Stack


UNTOLD: Final = "Default or RenormalizeNaive"
"""Routing of a config that does not say whether weights are renormalised."""

_ROUTINGS: Final = {
    ("softmax", False, True): "RenormalizeNaive",
    ("softmax", False, False): "Default",
    ("softmax", False, None): UNTOLD,
    ("sigmoid", False, True): "SigmoidRenorm",
    ("sigmoid", False, None): "SigmoidRenorm",
    ("sigmoid", False, False): "Sigmoid",
    ("sigmoid", True, True): "DeepSeekV3",
    ("sigmoid", True, None): "DeepSeekV3",
    ("sqrtsoftplus", False, True): "DeepseekV4",
    ("sqrtsoftplus", True, True): "DeepseekV4",
}
"""By scoring function, whether the router has a bias, and whether weights are renormalised: vLLM's
names, in which grouping among experts makes no difference to any row here."""

_BIASES: Final = ("e_score_correction_bias", "expert_bias", "router_bias")
VLLM_TRANSFORMERS: Final = ("flex_olmo", "hunyuan_v1_moe")
"""Models that vLLM runs with the code of transformers, whose routing is then a custom function."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What layers have in common whose experts are of one sort."""

    scheme: str
    experts: int
    hidden: int
    intermediate: int
    gated: bool


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine asks of a model beside the bytes of its experts.

    Attributes
    ----------
    routing
        What vLLM calls it.
    """

    model_type: str
    family: str
    activation: str
    is_clamped: bool
    routing: str
    kinds: tuple[Kind, ...]

    @property
    def gated(self) -> bool:
        """Whether the experts have a gate."""
        return all(kind.gated for kind in self.kinds)

    @property
    def experts(self) -> int:
        """The most experts of a layer."""
        return max((kind.experts for kind in self.kinds), default=0)


def model_of(
    family: Family, config: Mapping[str, Json], kinds: Iterable[Kind], names: Iterable[str]
) -> Model:
    """Return what engines ask of a model; `names` are its tensors', for a bias of its router."""
    types = model_types(config)
    return Model(
        model_type=types[-1] if types else "",
        family=family.name,
        activation=activation(family, config),
        is_clamped=is_clamped(family, config),
        routing=_routing(family, config, is_biased=_is_biased(family, names)),
        kinds=tuple(kinds),
    )


def kind_of(stack: Stack) -> Kind:
    """Return the sort of a layer's experts."""
    sizes, scheme = stack.geometry, stack.scheme.name
    return Kind(scheme, sizes.experts, sizes.hidden, sizes.intermediate, sizes.gated)


def kinds_of(stacks: Iterable[Stack]) -> tuple[Kind, ...]:
    """Return the sorts of experts that layers have, each once."""
    return tuple(dict.fromkeys(kind_of(stack) for stack in stacks))


def _is_biased(family: Family, names: Iterable[str]) -> bool:
    return family.routing.biased or any(name.endswith(_BIASES) for name in names)


def _routing(family: Family, config: Mapping[str, Json], *, is_biased: bool) -> str:
    if family.name == "llama4":
        return "Llama4"
    if family.routing.custom or set(model_types(config)) & set(VLLM_TRANSFORMERS):
        return "Custom"
    renormalised = renormalises(family, config)
    return _ROUTINGS.get((scoring(family, config), is_biased, renormalised), "Unspecified")
