"""What a model line calls its experts: the row type.

A family is data. Names are made of a root (`model.layers.{layer}`), a module (`mlp.experts`) and a
projection (`{expert}.gate_proj`); values of config.json are found by key, the first that is set
counts. What follows from them is worked out in `modelconfig` and `experts`, never here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

Projection: TypeAlias = Literal["gate", "up", "down", "gate_up"]

TEXT_ROOTS: Final = (
    "model.layers.{layer}",
    "layers.{layer}",
    "model.language_model.layers.{layer}",
    "language_model.model.layers.{layer}",
    "language_model.layers.{layer}",
)
"""Where layers of a text model lie, alone or as part of a larger model."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One way in which a family's experts are stored.

    Attributes
    ----------
    names
        What follows the module, for each projection: `{expert}.gate_proj` (one tensor an
        expert) or `gate_up_proj` (a stack of all experts). `gate_up` is a fused projection.
    transposed
        The matrix is `[in, out]`, so that a stack is `[E, H, 2I]` and `[E, I, H]`. Where a
        family has both, the shape decides.
    order
        How gate and up stand in `gate_up`: `[gate; up]` halves, or alternating pairs.
    """

    names: tuple[tuple[Projection, str], ...]
    transposed: bool = False
    order: Literal["halves", "pairs"] = "halves"


GATE_UP_DOWN: Final = Storage(
    (("gate", "{expert}.gate_proj"), ("up", "{expert}.up_proj"), ("down", "{expert}.down_proj"))
)
W1_W3_W2: Final = Storage((("gate", "{expert}.w1"), ("up", "{expert}.w3"), ("down", "{expert}.w2")))
UP_DOWN: Final = Storage((("up", "{expert}.up_proj"), ("down", "{expert}.down_proj")))
STACKED: Final = Storage((("gate_up", "gate_up_proj"), ("down", "down_proj")))
STACKED_TRANSPOSED: Final = Storage(STACKED.names, transposed=True)
STACKED_GATE_UP_DOWN: Final = Storage(
    (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj"))
)
STACKED_UP_DOWN: Final = Storage((("up", "up_proj"), ("down", "down_proj")))


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Which layers have routed experts, by config keys; an absent key rules nothing out.

    Attributes
    ----------
    moe_list
        The layers that have experts, a list or "3,4,5"; where it is set it decides alone.
    pattern
        A list or string with an item a layer, which has experts where the item (or its
        `block_type`) is in `pattern_items`; it decides alone, after `moe_list`. transformers 5
        writes `mlp_layer_types` for many families in place of the keys they were published with.
    first, first_default
        The first layer with experts, which is the number of dense ones before it; and what it is
        where no key says.
    last
        The last layer with experts; -1 is the last of all.
    dense_list
        The layers without experts.
    step
        A layer has experts where `(layer + 1) % step == 0`.
    period, offset
        A layer has experts where `layer % period == offset`.
    """

    moe_list: str | None = None
    pattern: tuple[str, ...] = ("mlp_layer_types", "moe_layer_freq")
    pattern_items: tuple[str | int, ...] = ("E", "moe", "sparse", "hash_moe", 1)
    first: str | None = None
    first_default: int = 0
    last: str | None = None
    dense_list: str | None = None
    step: str | None = None
    period: str | None = None
    offset: str | None = None


@dataclass(frozen=True, slots=True)
class Activation:
    """What stands between an expert's projections.

    Attributes
    ----------
    keys
        Config keys of its name.
    fixed
        What it is whatever the config says (some name another, which other modules use).
    default
        What it is where the config says nothing.
    limits
        Config keys of a limit that gate and up are clamped to: a number, or an item a layer.
    """

    keys: tuple[str, ...] = ("hidden_act", "hidden_activation")
    fixed: str | None = None
    default: str = "silu"
    limits: tuple[str, ...] = ("swiglu_limit", "swiglu_limits", "expert_swiglu_limit_list")


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts and their weights are found.

    Attributes
    ----------
    scoring, scoring_keys
        The function over the router's logits, unless one of the config keys names it.
    renormalise
        Whether the weights of the chosen experts are made to sum to one, whatever the config says;
        `None` where it does say.
    renormalise_keys, renormalise_default
        Config keys that say so, and what holds where none does; `None`: unknown.
    biased
        Whether the router always adds a bias to what it chooses by; where it need not, the names
        of the tensors tell.
    custom
        A routing of the family's own, in a few words.
    """

    scoring: str = "softmax"
    scoring_keys: tuple[str, ...] = ()
    renormalise: bool | None = None
    renormalise_keys: tuple[str, ...] = ("norm_topk_prob",)
    renormalise_default: bool | None = None
    biased: bool = False
    custom: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A model line.

    Attributes
    ----------
    name
        What `--family` and reports call it.
    model_types
        Values of `model_type` in config.json, of the model or of its text part.
    roots, modules
        Templates of a layer, and what the module in it that holds the experts is called. The same
        module elsewhere (MTP layers, other parts of an omni model) is left as it is, and counted.
    owns_module
        Whether everything in the module is routed experts, so that an unknown name is an error.
    storages
        The ways its experts are stored, the first that fits is taken.
    layers
        Which layers have experts.
    layer_count
        Config keys of the number of layers, MTP layers not counted: a number, or a list or string
        with an item a layer.
    layer_configs
        Config key of a list with an object a layer, whose keys go before the config's own.
    experts, hidden, intermediate
        Config keys of `E`, `H` and `I`: a number, or a list with one a layer.
    surplus
        Config key of a number of experts that compute nothing and follow the others; tensors that
        a writer made up for them are left as they are.
    activation, routing
        What an engine must know of them beside their weights.
    gated
        Whether experts have a gate projection.
    publishers
        Who publishes such models on the Hub: they are asked where a model is named without one.
    refusal
        Why none of these checkpoints can be converted, where none can.
    """

    name: str
    model_types: tuple[str, ...]
    roots: tuple[str, ...] = TEXT_ROOTS
    modules: tuple[str, ...] = ("mlp.experts",)
    owns_module: bool = True
    storages: tuple[Storage, ...] = (GATE_UP_DOWN, STACKED)
    layers: LayerRule = field(default=LayerRule())
    layer_count: tuple[str, ...] = ("num_hidden_layers", "num_layers", "n_layer")
    layer_configs: str | None = None
    experts: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    hidden: tuple[str, ...] = ("hidden_size",)
    intermediate: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size")
    surplus: str | None = None
    activation: Activation = field(default=Activation())
    routing: Routing = field(default=Routing())
    gated: bool = True
    publishers: tuple[str, ...] = ()
    refusal: str | None = None
