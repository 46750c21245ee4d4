"""Which source tensors are the experts of each layer?

Joins what a checkpoint holds, what its family calls things and how its scheme stores a matrix. The
result is a `Stack` a layer: complete, numbered without a gap, of one shape and one scheme.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from moeconv.checkpoint.types import Part, TensorRef
from moeconv.errors import SourceError, UnsupportedError
from moeconv.layouts.layout import Geometry
from moeconv.modelconfig import integer, layer_count, moe_layers
from moeconv.schemes import detect
from moeconv.tensors import TensorSpec

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.families.family import Family, Projection, Storage
    from moeconv.schemes.scheme import PartRow, Scheme

_Names: TypeAlias = "dict[tuple[Projection, str], dict[int | None, TensorRef]]"
"""Tensors by projection and suffix, then by expert (`None` for a stack of all)."""

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Source:
    """Where one part of one projection is kept, for every expert.

    Attributes
    ----------
    refs
        One tensor an expert, or a single stack of all.
    stacked
        Whether it is a single stack.
    transposed
        Whether the matrix is stored as `[in, out]`.
    first, step, fused
        Which logical rows of a fused gate-and-up matrix are this projection's: every `step`-th
        from `first` times the rows of one projection on; `fused` projections share the rows.
    """

    refs: tuple[TensorRef, ...]
    stacked: bool
    transposed: bool
    first: int = 0
    step: int = 1
    fused: int = 1

    def part(self, expert: int) -> Part:
        """Return the whole matrix of one expert."""
        ref = self.refs[0] if self.stacked else self.refs[expert]
        whole = Part(ref, expert if self.stacked else None, range(0), range(0), self.transposed)
        stored_rows, stored_cols = whole.stored_shape
        total = stored_cols if self.transposed else stored_rows
        start = self.first if self.step > 1 else self.first * (total // self.fused)
        stop = total if self.step > 1 else start + total // self.fused
        taken = range(start, stop, self.step)
        rows, cols = (range(stored_rows), taken) if self.transposed else (taken, range(stored_cols))
        return Part(ref, whole.expert, rows, cols, self.transposed)


@dataclass(frozen=True, slots=True)
class Stack:
    """The routed experts of one layer."""

    prefix: str
    layer: int
    geometry: Geometry
    scheme: Scheme
    sources: Mapping[tuple[str, str], Source]

    @property
    def names(self) -> frozenset[str]:
        """The source tensors it is made of."""
        return frozenset(ref.name for source in self.sources.values() for ref in source.refs)


@dataclass(frozen=True, slots=True)
class Experts:
    """The stacks of a checkpoint, and the expert tensors that are left as they are.

    Attributes
    ----------
    stacks
        A stack for every layer that the config promises, by layer.
    extra
        Tensors of experts outside the main model (MTP layers), which pass through.
    """

    stacks: tuple[Stack, ...]
    extra: frozenset[str]


def find_experts(checkpoint: Checkpoint, family: Family) -> Experts:
    """Find the routed experts of every layer.

    Raises
    ------
    SourceError
        A tensor is missing, of another shape than its siblings, or contradicts the config.
    UnsupportedError
        A name below the experts, or a mixture of dtypes, that no table knows.
    """
    groups = _group(checkpoint.tensors.values(), family)
    count, promised = layer_count(checkpoint.config), moe_layers(family, checkpoint.config)
    extra: set[str] = set()
    stacks = []
    for (prefix, layer), tensors in sorted(groups.items(), key=lambda item: item[0][::-1]):
        if layer >= count:
            extra.update(ref.name for ref in tensors.values())
            continue
        storage, names = _storage(prefix, tensors, family)
        stacks.append(_stack(prefix, layer, storage, names, family, checkpoint))
    _check_layers(stacks, promised, family)
    return Experts(tuple(stacks), frozenset(extra))


def _group(
    refs: Iterable[TensorRef], family: Family
) -> dict[tuple[str, int], dict[str, TensorRef]]:
    templates = "|".join(
        re.escape(prefix).replace(re.escape("{layer}"), r"(\d+)") for prefix in family.prefixes
    )
    pattern = re.compile(rf"({templates})\.(.+)")
    stems = tuple(
        name.rpartition("{expert}.")[2] for storage in family.storages for _, name in storage.names
    )
    groups: dict[tuple[str, int], dict[str, TensorRef]] = defaultdict(dict)
    for ref in refs:
        match = pattern.fullmatch(ref.name)
        if match is None:
            continue
        prefix, *layers, rest = match.groups()
        if family.owns_prefix or rest.startswith(stems):
            layer = next(int(layer) for layer in layers if layer is not None)
            groups[prefix, layer][rest] = ref
    return groups


def _storage(
    prefix: str, tensors: Mapping[str, TensorRef], family: Family
) -> tuple[Storage, _Names]:
    """Return the storage that maps every name below the prefix, and the names by it."""
    fits = [(storage, *_map_names(storage, tensors)) for storage in family.storages]
    storage, names, unmapped = min(fits, key=lambda fit: len(fit[2]))
    if unmapped:
        shown = ", ".join(f"`{prefix}.{rest}`" for rest in unmapped[:_SHOWN])
        message = (
            f"{len(unmapped)} tensors below `{prefix}` are not what the family `{family.name}` "
            f"calls its experts: {shown}{', …' if len(unmapped) > _SHOWN else ''}"
        )
        raise UnsupportedError(message, hint="nothing is dropped or guessed; add a storage row")
    return storage, names


def _map_names(storage: Storage, tensors: Mapping[str, TensorRef]) -> tuple[_Names, list[str]]:
    names: _Names = defaultdict(dict)
    unmapped = []
    patterns = [
        (
            projection,
            re.compile(re.escape(name).replace(re.escape("{expert}"), r"(\d+)") + r"([._].*)?"),
        )
        for projection, name in storage.names
    ]
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


def _stack(
    prefix: str,
    layer: int,
    storage: Storage,
    names: _Names,
    family: Family,
    checkpoint: Checkpoint,
) -> Stack:
    scheme = _scheme(prefix, storage, names)
    experts = integer(checkpoint.config, family.experts)
    if experts is None:
        message = f"`config.json` does not say `{family.experts[0]}`"
        raise SourceError(message)
    sources: dict[tuple[str, str], Source] = {}
    for projection, _ in storage.names:
        for row in scheme.parts:
            found = _refs(prefix, projection, row, names, storage, experts)
            if found is not None:
                sources.update(_split(projection, row, found, storage))
    geometry = _geometry(prefix, sources, scheme, storage, experts, family)
    _check_config(prefix, geometry, family, checkpoint)
    return Stack(prefix, layer, geometry, scheme, sources)


def _scheme(prefix: str, storage: Storage, names: _Names) -> Scheme:
    by_projection: dict[str, dict[str, str]] = {name: {} for name, _ in storage.names}
    for (projection, suffix), refs in names.items():
        dtypes = sorted({ref.spec.dtype for ref in refs.values()})
        by_projection[projection][suffix] = "+".join(dtypes)
    found = {name: detect(suffixes) for name, suffixes in by_projection.items() if suffixes}
    missing = sorted(name for name, suffixes in by_projection.items() if not suffixes)
    if missing:
        message = f"`{prefix}` has no {missing[0]} projection, only {', '.join(sorted(found))}"
        raise SourceError(message, hint="is a shard missing?")
    kinds = {scheme.name for scheme in found.values() if scheme}
    first = next(iter(found.values()))
    if len(kinds) != 1 or None in found.values() or first is None:
        shown = "; ".join(
            f"{name}: " + ", ".join(f"`{suffix or name}` {dtype}" for suffix, dtype in row.items())
            for name, row in sorted(by_projection.items())
        )
        message = f"the experts of `{prefix}` are stored in no scheme that is known: {shown}"
        raise UnsupportedError(message, hint="`moeconv list` names the schemes")
    return first


def _refs(
    prefix: str,
    projection: Projection,
    row: PartRow,
    names: _Names,
    storage: Storage,
    experts: int,
) -> tuple[TensorRef, ...] | None:
    suffix = next((s for s in row.suffixes if (projection, s) in names), None)
    if suffix is None:
        return None  # an optional part: `detect` saw to the others
    found = names[projection, suffix]
    template = dict(storage.names)[projection]
    stacked = "{expert}" not in template
    wanted: list[int | None] = [None] if stacked else list(range(experts))
    missing = [expert for expert in wanted if expert not in found]
    if missing and row.optional:
        return None
    if missing:
        name = template.format(expert=missing[0])
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
    stacked = "{expert}" not in dict(storage.names)[projection]
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


def _geometry(
    prefix: str,
    sources: Mapping[tuple[str, str], Source],
    scheme: Scheme,
    storage: Storage,
    experts: int,
    family: Family,
) -> Geometry:
    """Read H and I off the down projection, and hold every other tensor to them."""
    values = scheme.parts[0].values
    hidden, packed = sources["down", "weight"].part(0).shape
    intermediate = packed * values
    sizes = {"down": (hidden, intermediate), "gate_up": (2 * intermediate, hidden)}
    for (projection, name), source in sources.items():
        row = next(row for row in scheme.parts if row.part == name)
        rows, inner = sizes.get(projection, (intermediate, hidden))
        expected = {
            "matrix": (rows, -(-inner // row.values)),
            "rows": (rows, 1),
            "scalar": (1, 1),
        }[row.axes]
        found = source.part(0).shape
        if scheme.advice is None and found != expected:
            message = (
                f"`{source.refs[0].name}` is {source.refs[0].spec}: expected {list(expected)} for "
                f"{projection}'s {name}, found {list(found)}"
            )
            hint = f"hidden {hidden} and intermediate {intermediate} are read off the down weight"
            raise SourceError(message, hint=hint)
    if family.gated and ("gate", "weight") not in sources:
        message = f"`{prefix}` has no gate projection, but `{family.name}` is gated"
        raise SourceError(message)
    return Geometry(experts, hidden, intermediate, family.gated, storage.order)


def _check_config(prefix: str, geometry: Geometry, family: Family, checkpoint: Checkpoint) -> None:
    for keys, found in (
        (family.hidden, geometry.hidden),
        (family.intermediate, geometry.intermediate),
    ):
        said = integer(checkpoint.config, keys)
        if said is not None and said != found:
            message = (
                f"`config.json` says {keys[0]} {said}, but the experts of `{prefix}` have {found}"
            )
            hint = "config and weights are of two models, or the family's row is wrong"
            raise SourceError(message, hint=hint)


def _check_layers(stacks: list[Stack], promised: frozenset[int], family: Family) -> None:
    found = [stack.layer for stack in stacks]
    twice = sorted({layer for layer in found if found.count(layer) > 1})
    missing, surplus = sorted(promised - set(found)), sorted(set(found) - promised)
    if not found:
        message = f"there are no routed experts under the names of the family `{family.name}`"
        expected = ", ".join(f"`{prefix}`" for prefix in family.prefixes)
        raise UnsupportedError(message, hint=f"expected one of {expected}")
    for layers, what in (
        (missing, "has no experts, but `config.json` promises them"),
        (surplus, "has experts, but `config.json` says it is dense"),
        (twice, "has experts under two prefixes"),
    ):
        if layers:
            more = f" (and {len(layers) - 1} more)" if len(layers) > 1 else ""
            message = f"layer {layers[0]}{more} {what}"
            raise SourceError(
                message, hint="is a shard missing, or is the config of another model?"
            )
