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
    for part in text_configs(config):
        for key in keys:
            if part.get(key) is not None:
                return part[key]
    return None


def integer(config: Mapping[str, Json], keys: tuple[str, ...]) -> int | None:
    """Return the first of `keys` that is set, which must be an integer.

    Raises
    ------
    SourceError
        It is set to something else.
    """
    value = first(config, keys)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"`config.json` sets `{keys[0]}` to {value!r}, expected an integer"
        raise SourceError(message)
    return value


def layer_count(config: Mapping[str, Json]) -> int:
    """Return the number of layers of the main model, MTP layers not counted.

    Raises
    ------
    SourceError
        The config does not say.
    """
    count = integer(config, ("num_hidden_layers", "num_layers", "n_layer"))
    if count is None:
        message = "`config.json` does not say `num_hidden_layers`"
        raise SourceError(message, hint="every layer is checked against it; complete the config")
    return count


def moe_layers(family: Family, config: Mapping[str, Json]) -> frozenset[int]:
    """Return the layers that the config promises experts for, by the family's rule."""
    count, rule = layer_count(config), family.layers
    listed = _layer_list(config, rule.moe_list)
    if listed is not None:
        return frozenset(listed)
    items = first(config, rule.pattern) if rule.pattern else None
    if isinstance(items, (list, str)):
        return frozenset(i for i, item in enumerate(items) if item in rule.pattern_items)
    layers = set(range(_key(config, rule.dense_first) or 0, count))
    layers -= set(_layer_list(config, rule.dense_list) or ())
    step = _key(config, rule.step) or 1
    period, offset = _key(config, rule.period) or 1, _key(config, rule.offset) or 0
    return frozenset(i for i in layers if (i + 1) % step == 0 and i % period == offset % period)


def _key(config: Mapping[str, Json], key: str | None) -> int | None:
    return integer(config, (key,)) if key else None


def _layer_list(config: Mapping[str, Json], key: str | None) -> list[int] | None:
    value = first(config, (key,)) if key else None
    if not isinstance(value, list):
        return None
    return [item for item in value if isinstance(item, int)]
