"""What does config.json say of the experts, and which layers does it promise?

Values may lie in the config itself or in the part of it that describes the text model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moeconv.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moeconv.checkpoint.types import Json
    from moeconv.families.family import Family

_TEXT_PARTS: Final = ("text_config", "language_config", "llm_config", "thinker_config")
_SAME_ACTIVATION: Final = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


_MOST_LAYERS: Final = 100_000


def text_configs(config: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    """Return the text model's config, innermost first, and the whole one last."""
    for key in _TEXT_PARTS:
        part = config.get(key)
        if isinstance(part, dict):
            return [*text_configs(part), config]
    return [config]


def model_types(config: Mapping[str, Json]) -> list[str]:
    """Return the `model_type` of the whole model, then of its text part."""
    found = [part.get("model_type") for part in reversed(text_configs(config))]
    return [name for name in found if isinstance(name, str)]


def first(config: Mapping[str, Json], keys: tuple[str, ...]) -> Json:
    """Return the first of `keys` that is set, or `None`."""
    return _first(config, keys)[1]


def layer_count(family: Family, config: Mapping[str, Json]) -> int:
    """Return the number of layers of the main model, MTP layers not counted.

    Raises
    ------
    SourceError
        The config does not say.
    """
    key, count = _first(config, family.layer_count)
    if isinstance(count, (list, str)):
        return len(count)
    if count is None:
        message = f"`config.json` does not say `{family.layer_count[0]}`"
        raise SourceError(message, hint="every layer is checked against it; complete the config")
    layers = _integer(key, count)
    if layers > _MOST_LAYERS:
        message = f"`config.json` sets `{key}` to {layers}, more than any model has"
        raise SourceError(message)
    return layers


def moe_layers(family: Family, config: Mapping[str, Json]) -> frozenset[int]:
    """Return the layers that the config promises experts for, by the family's rule.

    Raises
    ------
    SourceError
        A value is not what the rule can read.
    """
    count, rule = layer_count(family, config), family.layers
    listed = _layer_list(config, rule.moe_list)
    if listed is not None:
        return frozenset(layer for layer in listed if layer < count)
    key, items = _first(config, rule.pattern)
    if isinstance(items, (list, str)):
        if len(items) < count:
            message = f"`config.json` has {len(items)} items in `{key}` for {count} layers"
            raise SourceError(message)
        return frozenset(i for i in range(count) if _block_type(items[i]) in rule.pattern_items)
    start = _key(config, rule.first, rule.first_default)
    last = _key(config, rule.last, -1)
    layers = set(range(start, count if last < 0 else min(count, last + 1)))
    layers -= set(_layer_list(config, rule.dense_list) or ())
    step = _key(config, rule.step, 1)
    period, offset = _key(config, rule.period, 1), _key(config, rule.offset, 0)
    if step < 1 or period < 1:
        return frozenset()
    return frozenset(i for i in layers if (i + 1) % step == 0 and i % period == offset % period)


def layer_integer(
    family: Family, config: Mapping[str, Json], keys: tuple[str, ...], layer: int
) -> int | None:
    """Return the first of `keys` that is set, for one layer; a list has an item a layer.

    Raises
    ------
    SourceError
        It is set to something else.
    """
    blocks = first(config, (family.layer_configs,)) if family.layer_configs else None
    block = blocks[layer] if isinstance(blocks, list) and layer < len(blocks) else None
    key, value = _first(block, keys) if isinstance(block, dict) else ("", None)
    if value is None:
        key, value = _first(config, keys)
    if isinstance(value, list) and len(value) == layer_count(family, config):
        value = value[layer]
    return None if value is None else _integer(key, value)


def surplus_experts(family: Family, config: Mapping[str, Json]) -> int:
    """Return how many experts without weights of their own follow the others."""
    return _key(config, family.surplus, 0)


def activation(family: Family, config: Mapping[str, Json]) -> str:
    """Return what stands between the projections of an expert, in the config's words."""
    row = family.activation
    said = first(config, row.keys)
    found = row.fixed or (said if isinstance(said, str) else row.default)
    return _SAME_ACTIVATION.get(found, found)


def is_clamped(family: Family, config: Mapping[str, Json]) -> bool:
    """Say whether gate and up are clamped to a limit in some layer."""
    limits = first(config, family.activation.limits)
    return any(limits) if isinstance(limits, list) else bool(limits)


def scoring(family: Family, config: Mapping[str, Json]) -> str:
    """Return the function over the router's logits."""
    said = first(config, family.routing.scoring_keys)
    return said if isinstance(said, str) else family.routing.scoring


def renormalises(family: Family, config: Mapping[str, Json]) -> bool | None:
    """Say whether the weights of a token's experts are made to sum to one; `None`: unknown."""
    row = family.routing
    if row.renormalise is not None:
        return row.renormalise
    said = first(config, row.renormalise_keys)
    return said if isinstance(said, bool) else row.renormalise_default


def _first(config: Mapping[str, Json], keys: tuple[str, ...]) -> tuple[str, Json]:
    for part in text_configs(config):
        for key in keys:
            if part.get(key) is not None:
                return key, part[key]
    return "", None


def _integer(key: str, value: Json) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"`config.json` sets `{key}` to {value!r}, expected an integer"
        raise SourceError(message)
    return value


def _key(config: Mapping[str, Json], key: str | None, default: int) -> int:
    value = first(config, (key,)) if key else None
    return default if key is None or value is None else _integer(key, value)


def _layer_list(config: Mapping[str, Json], key: str | None) -> list[int] | None:
    value = first(config, (key,)) if key else None
    if value is None:
        return None
    items = value.split(",") if isinstance(value, str) else value
    if isinstance(items, list):
        layers = [int(str(item)) for item in items if str(item).strip().isdigit()]
        if len(layers) == len(items):
            return layers
    message = f"`config.json` sets `{key}` to {value!r}, expected layer numbers"
    raise SourceError(message)


def _block_type(item: Json) -> Json:
    return item.get("block_type") if isinstance(item, dict) else item
