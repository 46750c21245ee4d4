"""Which tensors does a family call experts, and of which layer?

Names only: no shape, no dtype, no config.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from moeconv.checkpoint.types import TensorRef
    from moeconv.families.family import Family, Projection, Storage

Names: TypeAlias = "dict[tuple[Projection, str], dict[int | None, TensorRef]]"
"""Tensors by projection and suffix, then by expert (`None` for a stack of all)."""


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules that hold experts.

    Attributes
    ----------
    layers
        For each prefix and layer, what follows the prefix in a name, and the tensor of that name.
    elsewhere
        Experts under other prefixes: MTP layers, other parts of an omni model.
    """

    layers: Mapping[tuple[str, int], Mapping[str, TensorRef]]
    elsewhere: tuple[TensorRef, ...]


def find_modules(refs: Iterable[TensorRef], family: Family) -> Modules:
    """Sort tensors by the experts module that they belong to; others are left out."""
    roots = "|".join(_pattern(root) for root in family.roots)
    modules = "|".join(_pattern(module) for module in family.modules)
    inside = re.compile(rf"((?:{roots})\.(?:{modules}))\.(.+)")
    anywhere = re.compile(rf"(?:.+\.)?(?:{modules})\.(.+)")
    patterns = [pattern for storage in family.storages for _, pattern in _patterns(storage)]
    layers: dict[tuple[str, int], dict[str, TensorRef]] = defaultdict(dict)
    elsewhere = []
    for ref in refs:
        match = inside.fullmatch(ref.name) or anywhere.fullmatch(ref.name)
        if match is None:
            continue
        rest = match[match.re.groups]
        is_inside = match.re is inside
        is_expert = (is_inside and family.owns_module) or any(
            pattern.fullmatch(rest) for pattern in patterns
        )
        if is_expert and not is_inside:
            elsewhere.append(ref)
        elif is_expert:
            layer = next(int(group) for group in match.groups()[1:] if group is not None)
            layers[match[1], layer][rest] = ref
    return Modules(layers, tuple(elsewhere))


def map_names(storage: Storage, tensors: Mapping[str, TensorRef]) -> tuple[Names, list[str]]:
    """Return the tensors of a module by projection, and the names that none of them has."""
    names: Names = defaultdict(dict)
    unmapped = []
    patterns = _patterns(storage)
    for rest, ref in tensors.items():
        for projection, pattern in patterns:
            match = pattern.fullmatch(rest)
            if match:
                *expert, suffix = match.groups()
                names[projection, suffix or ""][int(expert[0]) if expert else None] = ref
                break
        else:
            unmapped.append(rest)
    return names, unmapped


def without(names: Names, experts: range) -> Names:
    """Leave some experts out."""
    left = {
        key: {expert: ref for expert, ref in refs.items() if expert not in experts}
        for key, refs in names.items()
    }
    return {key: refs for key, refs in left.items() if refs}


def is_stacked(storage: Storage, projection: Projection) -> bool:
    """Say whether all experts of a projection are one tensor."""
    return "{expert}" not in dict(storage.names)[projection]


def _patterns(storage: Storage) -> list[tuple[Projection, re.Pattern[str]]]:
    return [
        (projection, re.compile(_pattern(name) + r"([._].*)?"))
        for projection, name in storage.names
    ]


def _pattern(template: str) -> str:
    """Return the regular expression of a template; its number is a group.

    Numbers are as Python writes them, so that no two names are one expert.
    """
    return r"(0|[1-9]\d*)".join(re.escape(piece) for piece in re.split(r"\{\w+\}", template))
