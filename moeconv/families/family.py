"""What a model line calls its experts: the row type.

A family is data. Names are templates with `{layer}` and `{expert}`; config values are found by
key. What follows from them is worked out in `stacks`, never here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Projection: TypeAlias = Literal["gate", "up", "down", "gate_up"]


@dataclass(frozen=True, slots=True)
class Storage:
    """One way in which a family's experts are stored.

    Attributes
    ----------
    names
        What follows the module prefix, for each projection: `{expert}.gate_proj` (one tensor an
        expert) or `gate_up_proj` (a stack of all experts). `gate_up` is a fused projection.
    transposed
        The matrix is `[in, out]`, so that a stack is `[E, H, 2I]` and `[E, I, H]`.
    order
        How gate and up stand in `gate_up`: `[gate; up]` halves, or alternating pairs.
    """

    names: tuple[tuple[Projection, str], ...]
    transposed: bool = False
    order: Literal["halves", "pairs"] = "halves"


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Which layers have routed experts, by config keys; an absent key rules nothing out.

    Attributes
    ----------
    dense_first
        The number of dense layers before the first MoE layer.
    dense_list, moe_list
        Lists of the layers that are dense, or of those that are not (which then decides alone).
    step
        A layer is MoE where `(layer + 1) % step == 0`.
    period, offset
        A layer is MoE where `layer % period == offset`.
    pattern
        A list or string, an item a layer; it is MoE where the item is in `pattern_items`.
    """

    dense_first: str | None = None
    dense_list: str | None = None
    moe_list: str | None = None
    step: str | None = None
    period: str | None = None
    offset: str | None = None
    pattern: tuple[str, ...] = ()
    pattern_items: tuple[str, ...] = ("E", "moe", "sparse")


GATE_UP_DOWN = Storage(
    (("gate", "{expert}.gate_proj"), ("up", "{expert}.up_proj"), ("down", "{expert}.down_proj"))
)
W1_W3_W2 = Storage((("gate", "{expert}.w1"), ("up", "{expert}.w3"), ("down", "{expert}.w2")))
UP_DOWN = Storage((("up", "{expert}.up_proj"), ("down", "{expert}.down_proj")))
STACKED = Storage((("gate_up", "gate_up_proj"), ("down", "down_proj")))
STACKED_TRANSPOSED = Storage((("gate_up", "gate_up_proj"), ("down", "down_proj")), transposed=True)
STACKED_UP_DOWN = Storage((("up", "up_proj"), ("down", "down_proj")))


@dataclass(frozen=True, slots=True)
class Family:
    """A model line.

    Attributes
    ----------
    name
        What `--family` and reports call it.
    model_types
        Values of `model_type` in config.json, of the model or of its text part.
    prefixes
        Templates of the module that holds the experts.
    storages
        The ways its experts are stored, the first that fits is taken.
    layers
        Which layers have experts.
    experts, hidden, intermediate
        Config keys of `E`, `H` and `I`, the first that is there counts.
    activation
        Config keys of the activation.
    gated
        Whether experts have a gate projection.
    owns_prefix
        Whether everything below the prefix is routed experts, so that an unknown name is an error.
    """

    name: str
    model_types: tuple[str, ...]
    prefixes: tuple[str, ...] = (
        "model.layers.{layer}.mlp.experts",
        "model.language_model.layers.{layer}.mlp.experts",
        "language_model.model.layers.{layer}.mlp.experts",
    )
    storages: tuple[Storage, ...] = (GATE_UP_DOWN, STACKED)
    layers: LayerRule = field(default=LayerRule())
    experts: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    hidden: tuple[str, ...] = ("hidden_size",)
    intermediate: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size")
    activation: tuple[str, ...] = ("hidden_act", "hidden_activation")
    gated: bool = True
    owns_prefix: bool = True
