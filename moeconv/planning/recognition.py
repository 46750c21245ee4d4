"""Which family is this checkpoint? By the person's word, by its `model_type`, or not at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeconv.checkpoint.types import TensorRef
from moeconv.errors import SourceError, UnsupportedError
from moeconv.families import FAMILIES
from moeconv.families.family import Family
from moeconv.planning.experts import find_experts
from moeconv.planning.modelconfig import model_types
from moeconv.planning.naming import find_modules
from moeconv.planning.stacks import Experts

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint


@dataclass(frozen=True, slots=True)
class Readings:
    """What each family makes of the experts of a checkpoint."""

    experts: Mapping[Family, Experts]

    @property
    def agree(self) -> bool:
        """Whether all of them make the same of it, and there are any."""
        found = list(self.experts.values())
        return bool(found) and all(experts == found[0] for experts in found)


def pick_family(checkpoint: Checkpoint, name: str | None = None) -> Family:
    """Return the family of a checkpoint, by name or by its `model_type`.

    Raises
    ------
    UnsupportedError
        There is none.
    """
    known = ", ".join(family.name for family in FAMILIES)
    if name:
        for family in FAMILIES:
            if family.name == name:
                return family
        message = f"`--family {name}` is no family that moeconv knows"
        raise UnsupportedError(message, hint=f"known families: {known}")
    types = model_types(checkpoint.config)
    for model_type in types:
        for family in FAMILIES:
            if model_type in family.model_types:
                return family
    shown = f"model_type {' / '.join(types)}" if types else "no model_type"
    message = f"`config.json` says {shown}, which no family of moeconv names"
    raise UnsupportedError(message, hint=_family_hint(checkpoint))


def named_alike(checkpoint: Checkpoint) -> tuple[Family, ...]:
    """Return the families whose names some tensors have, whatever the config says."""
    kinds = {re.sub(r"\d+", "0", name): ref for name, ref in checkpoint.tensors.items()}
    refs = [TensorRef(name, ref.spec, ref.file, ref.begin) for name, ref in kinds.items()]
    return tuple(family for family in FAMILIES if find_modules(refs, family).layers)


def reading_families(checkpoint: Checkpoint) -> tuple[Readings, Mapping[str, str]]:
    """Return the families whose names read the experts, and why others with like names do not."""
    read: dict[Family, Experts] = {}
    refused: dict[str, str] = {}
    for family in named_alike(checkpoint):
        try:
            read[family] = find_experts(checkpoint, family)
        except (SourceError, UnsupportedError) as error:
            refused[family.name] = str(error)
    return Readings(read), refused


def _family_hint(checkpoint: Checkpoint) -> str:
    """Say which `--family` reads a checkpoint of an unknown model."""
    read, refused = reading_families(checkpoint)
    names = ", ".join([family.name for family in read.experts] or refused)
    if not names:
        known = ", ".join(family.name for family in FAMILIES)
        return (
            f"nor are its experts named as one of them names its own: {known}; "
            "docs/how-to/add-a-family.md says how to add one"
        )
    if not read.experts:
        return f"its experts are named as in {names}, but {next(iter(refused.values()))}"
    if len(read.experts) == 1:
        return f"`--family {names}` reads its experts; say so if the model is built alike"
    if read.agree:
        return f"say `--family` with one of these, which all read its experts alike: {names}"
    return (
        f"its experts can be read as in {names}, which take the same bytes in different orders; "
        "find the right one in the model's own code, then say `--family`"
    )
