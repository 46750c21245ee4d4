"""Where is each part of each projection of a layer kept, and how?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeconv.checkpoint.types import TensorRef
from moeconv.errors import SourceError
from moeconv.planning.naming import is_stacked
from moeconv.planning.stacks import Source
from moeconv.tensors import TensorSpec

if TYPE_CHECKING:
    from moeconv.families.family import Projection, Storage
    from moeconv.planning.naming import Names
    from moeconv.schemes.scheme import PartRow, Scheme


@dataclass(frozen=True, slots=True)
class Module:
    """The experts of one layer by name, and how that family stores them."""

    prefix: str
    storage: Storage
    names: Names


def find_sources(module: Module, scheme: Scheme, experts: int) -> dict[tuple[str, str], Source]:
    """Return the sources of every part, by projection and part.

    Raises
    ------
    SourceError
        A tensor is missing, or of another shape than its siblings.
    """
    sources: dict[tuple[str, str], Source] = {}
    for projection, _ in module.storage.names:
        for row in scheme.parts:
            found = _refs(module, projection, row, experts)
            if found is not None:
                sources.update(_split(projection, row, found, module.storage))
    return sources


def _refs(
    module: Module, projection: Projection, row: PartRow, experts: int
) -> tuple[TensorRef, ...] | None:
    prefix, storage, names = module.prefix, module.storage, module.names
    suffix = next((s for s in row.suffixes if (projection, s) in names), None)
    if suffix is None:
        return None  # an optional part: `detect` saw to the others
    found = names[projection, suffix]
    stacked = is_stacked(storage, projection)
    # No further than what is there and one more, however many experts the config claims.
    count = min(experts, len(found) + 1)
    wanted: list[int | None] = [None] if stacked else list(range(count))
    missing = [expert for expert in wanted if expert not in found]
    if missing and row.optional:
        return None
    if missing:
        name = dict(storage.names)[projection].format(expert=missing[0])
        message = (
            f"`{prefix}.{name}{suffix}` is missing: expected {experts} experts, found "
            f"{len(found)} tensors of this kind"
        )
        raise SourceError(message, hint="is a shard missing, or does the config fit another model?")
    if len(found) > len(wanted):
        most = max(expert for expert in found if expert is not None)
        message = f"`{prefix}` has an expert {most}, but `config.json` says {experts} experts"
        raise SourceError(message)
    refs = tuple(_as_bytes(found[expert]) for expert in wanted)
    odd = next((ref for ref in refs if ref.spec != refs[0].spec), None)
    if odd:
        message = f"`{odd.name}` is {odd.spec}, but `{refs[0].name}` is {refs[0].spec}"
        raise SourceError(message)
    if stacked and (not refs[0].spec.shape or refs[0].spec.shape[0] != experts):
        message = f"`{refs[0].name}` is {refs[0].spec}, expected {experts} experts first"
        raise SourceError(message)
    return refs


def _as_bytes(ref: TensorRef) -> TensorRef:
    """Count the elements of a 4-bit tensor in byte-wide pairs, as other writers do (U8)."""
    if ref.spec.dtype != "F4":
        return ref
    *outer, last = ref.spec.shape
    return TensorRef(ref.name, TensorSpec("U8", (*outer, last // 2)), ref.file, ref.begin)


def _split(
    projection: Projection, row: PartRow, refs: tuple[TensorRef, ...], storage: Storage
) -> dict[tuple[str, str], Source]:
    """Return the sources of a projection; a fused one is also its gate and its up."""
    stacked = is_stacked(storage, projection)
    transposed = storage.transposed and row.axes == "matrix"
    whole = Source(refs, stacked=stacked, transposed=transposed)
    if projection != "gate_up":
        return {(projection, row.part): whole}
    step = 2 if storage.order == "pairs" else 1
    halves = (
        Source(refs, stacked=stacked, transposed=transposed, first=i, step=step, fused=2)
        for i in range(2)
    )
    if row.axes == "scalar":
        halves = (whole, whole)  # type: ignore[assignment]
    gate, up = halves
    return {("gate_up", row.part): whole, ("gate", row.part): gate, ("up", row.part): up}
