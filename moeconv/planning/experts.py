"""Which source tensors are the experts of each layer?

Joins what a checkpoint holds, what its family calls things and how its scheme stores a matrix. The
result is a `Stack` a layer: complete, numbered without a gap, of one shape and one scheme.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeconv.checkpoint.types import TensorRef
from moeconv.errors import MoeconvError, SourceError, UnsupportedError
from moeconv.layouts.layout import Geometry
from moeconv.planning.modelconfig import layer_count, layer_integer, moe_layers, surplus_experts
from moeconv.planning.naming import find_modules, is_stacked, map_names, without
from moeconv.planning.parts import Module, find_sources
from moeconv.planning.stacks import Experts, Source, Stack
from moeconv.schemes import detect

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.families.family import Family
    from moeconv.schemes.scheme import Scheme

_SHOWN = 5
_STACK = 3


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What config.json says of one layer's experts; `None`: nothing."""

    experts: int
    surplus: int
    hidden: int | None
    intermediate: int | None


def find_experts(checkpoint: Checkpoint, family: Family) -> Experts:
    """Find the routed experts of every layer.

    Raises
    ------
    SourceError
        A tensor is missing, of another shape than its siblings, or contradicts the config.
    UnsupportedError
        A name below the experts, or a mixture of dtypes, that no table knows.
    """
    experts, problems = look_for_experts(checkpoint, family)
    if problems:
        raise problems[0]
    return experts


def look_for_experts(
    checkpoint: Checkpoint, family: Family
) -> tuple[Experts, tuple[MoeconvError, ...]]:
    """Find the experts of every layer that has sound ones, and what is wrong with the others.

    Raises
    ------
    SourceError, UnsupportedError
        The config or the family stands against all layers.
    """
    if family.refusal:
        message = f"the family `{family.name}` cannot be converted: {family.refusal}"
        raise UnsupportedError(message)
    modules = find_modules(checkpoint.tensors.values(), family)
    count = layer_count(family, checkpoint.config)
    promised = moe_layers(family, checkpoint.config)
    extra = {ref.name for ref in modules.elsewhere}
    stacks: list[Stack] = []
    problems: list[MoeconvError] = []
    found = []
    for (prefix, layer), tensors in sorted(modules.layers.items(), key=lambda item: item[0][::-1]):
        extra.update(ref.name for ref in tensors.values())
        if layer < count:
            found.append(layer)
            try:
                stacks.append(_stack(prefix, layer, tensors, family, checkpoint))
                extra -= stacks[-1].names
            except (SourceError, UnsupportedError) as problem:
                problems.append(problem)
                extra.difference_update(ref.name for ref in tensors.values())
    problems += _layer_problems(found, promised, family)
    return Experts(tuple(stacks), frozenset(extra)), tuple(problems)


def _module(prefix: str, tensors: Mapping[str, TensorRef], family: Family, sizes: _Sizes) -> Module:
    """Map every name below a prefix to a projection and an expert."""
    fits = [(storage, *map_names(storage, tensors)) for storage in family.storages]
    unmapped = min((fit[2] for fit in fits), key=len)
    if unmapped:
        shown = ", ".join(f"`{prefix}.{rest}`" for rest in unmapped[:_SHOWN])
        message = (
            f"{len(unmapped)} tensors below `{prefix}` are not what the family `{family.name}` "
            f"calls its experts: {shown}{', …' if len(unmapped) > _SHOWN else ''}"
        )
        raise UnsupportedError(message, hint="nothing is dropped or guessed; add a storage row")
    surplus = range(sizes.experts, sizes.experts + sizes.surplus)
    named = [
        Module(prefix, storage, without(names, surplus))
        for storage, names, unmapped in fits
        if not unmapped
    ]
    shaped = [module for module in named if _rows_fit(module, sizes)]
    if len(named) == 1 or not shaped:
        return named[0]  # a wrong shape is named where the geometry is read
    if len(shaped) > 1:
        message = (
            f"the experts of `{prefix}` may be stored as [out, in] or as [in, out], and "
            f"`config.json` says neither `{family.hidden[-1]}` nor `{family.intermediate[0]}`"
        )
        raise UnsupportedError(message, hint="their shapes are compared with these; add them")
    return shaped[0]


def _rows_fit(module: Module, sizes: _Sizes) -> bool:
    """Say whether stacks have the rows that the config promises.

    Rows alone decide, which no scheme packs: down and a fused gate and up cannot both have theirs
    in both orientations.
    """
    up = sizes.intermediate
    rows = {"gate": up, "up": up, "gate_up": up and 2 * up, "down": sizes.hidden}
    for (projection, _), refs in module.names.items():
        for ref in refs.values():
            shape = ref.spec.shape
            is_matrix = len(shape) == _STACK and is_stacked(module.storage, projection)
            axis = -1 if module.storage.transposed else 1
            if is_matrix and rows[projection] not in {None, shape[axis]}:
                return False
    return True


def _stack(
    prefix: str,
    layer: int,
    tensors: Mapping[str, TensorRef],
    family: Family,
    checkpoint: Checkpoint,
) -> Stack:
    sizes = _sizes(layer, family, checkpoint)
    module = _module(prefix, tensors, family, sizes)
    scheme = _scheme(module)
    sources = find_sources(module, scheme, sizes.experts)
    geometry = _geometry(module, sources, scheme, sizes.experts, family)
    _check_config(prefix, geometry, family, sizes)
    return Stack(prefix, layer, geometry, scheme, sources)


def _sizes(layer: int, family: Family, checkpoint: Checkpoint) -> _Sizes:
    experts, hidden, intermediate = (
        layer_integer(family, checkpoint.config, keys, layer)
        for keys in (family.experts, family.hidden, family.intermediate)
    )
    if experts is None:
        message = f"`config.json` does not say `{family.experts[0]}`"
        raise SourceError(message)
    return _Sizes(experts, surplus_experts(family, checkpoint.config), hidden, intermediate)


def _scheme(module: Module) -> Scheme:
    prefix, names = module.prefix, module.names
    by_projection: dict[str, dict[str, str]] = {name: {} for name, _ in module.storage.names}
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
        examples = (
            (
                next(iter(refs.values())).name.removeprefix(f"{prefix}."),
                by_projection[key[0]][key[1]],
            )
            for key, refs in names.items()
        )
        shown = ", ".join(f"`{name}` {dtype}" for name, dtype in sorted(examples))
        message = f"the experts of `{prefix}` are stored in no scheme that is known: {shown}"
        raise UnsupportedError(message, hint="docs/reference/support.md lists the schemes")
    return first


def _geometry(
    module: Module,
    sources: Mapping[tuple[str, str], Source],
    scheme: Scheme,
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
        message = f"`{module.prefix}` has no gate projection, but `{family.name}` is gated"
        raise SourceError(message)
    return Geometry(
        experts,
        hidden,
        intermediate,
        family.gated,
        module.storage.order,
        reciprocal=scheme.reciprocal,
        scale_bytes=_scale_bytes(sources),
    )


def _scale_bytes(sources: Mapping[tuple[str, str], Source]) -> int:
    source = sources.get(("down", "weight_scale"))
    return source.part(0).item_bytes if source else 1


def _check_config(prefix: str, geometry: Geometry, family: Family, sizes: _Sizes) -> None:
    for keys, said, found in (
        (family.hidden, sizes.hidden, geometry.hidden),
        (family.intermediate, sizes.intermediate, geometry.intermediate),
    ):
        if said is not None and said != found:
            message = (
                f"`config.json` says {keys[0]} {said}, but the experts of `{prefix}` have {found}"
            )
            hint = "config and weights are of two models, or `--family` names the wrong one"
            raise SourceError(message, hint=hint)


def _layer_problems(
    found: list[int], promised: frozenset[int], family: Family
) -> Iterator[MoeconvError]:
    twice = sorted({layer for layer in found if found.count(layer) > 1})
    missing, surplus = sorted(promised - set(found)), sorted(set(found) - promised)
    if not found:
        message = f"there are no routed experts under the names of the family `{family.name}`"
        expected = " or ".join(f"`{family.roots[0]}.{module}`" for module in family.modules)
        yield UnsupportedError(message, hint=f"expected {expected}, or the like elsewhere")
        return
    for layers, what in (
        (missing, "has no experts, but `config.json` promises them"),
        (surplus, "has experts, but `config.json` says it is dense"),
        (twice, "has experts under two prefixes"),
    ):
        if layers:
            more = f" (and {len(layers) - 1} more)" if len(layers) > 1 else ""
            message = f"layer {layers[0]}{more} {what}"
            yield SourceError(
                message, hint="is a shard missing, or is the config of another model?"
            )
