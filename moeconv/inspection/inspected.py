"""What is said of a directory that was looked at? The JSON of `moeconv inspect`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeconv.errors import UnsupportedError
from moeconv.planning.acceptance import Word

if TYPE_CHECKING:
    from moeconv.planning.acceptance import Answer
    from moeconv.planning.traits import Kind


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose experts are of one sort.

    Attributes
    ----------
    layers
        Their numbers, as `0-2, 5`.
    count
        How many they are.
    order
        How gate and up rows stand in a fused source: `halves` or `pairs`.
    nbytes
        Bytes of the experts of all of them, as stored.
    """

    layers: str
    count: int
    scheme: str
    experts: int
    hidden: int
    intermediate: int
    gated: bool
    order: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class EngineSight:
    """What one engine says.

    Attributes
    ----------
    flags
        What selects the kernel there.
    answer
        `yes`, `yes, but` or `no`.
    reasons
        Why not, or what of the `but`.
    needs
        What it needs for it.
    start
        The command that serves a converted directory; `None` before it is converted.
    """

    engine: str
    versions: str
    flags: str
    answer: Word
    reasons: tuple[str, ...]
    needs: tuple[str, ...]
    start: str | None = None


@dataclass(frozen=True, slots=True)
class LayoutSight:
    """Whether a layout can hold the experts, and who then takes them.

    Attributes
    ----------
    answer
        `yes`, `yes, but` or `no`: the best of its engines, if it can hold the experts at all.
    reasons
        Why it cannot hold them.
    left
        Layers of other experts, which it leaves as they are.
    tp_sizes
        TP sizes that one file serves, of 1, 2, 4, 8, 16 and 32.
    own_tp_sizes
        Those that need a file of their own (`--tp`).
    command
        What makes it; `None` where nothing does.
    """

    layout: str
    answer: Word
    reasons: tuple[str, ...]
    left: int
    tp_sizes: tuple[int, ...]
    own_tp_sizes: tuple[int, ...]
    command: str | None
    engines: tuple[EngineSight, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that stands against a conversion.

    Attributes
    ----------
    code
        The exit code of a conversion that meets it.
    more
        How many others are like it, of other layers.
    """

    code: int
    message: str
    hint: str | None
    more: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointSight:
    """A checkpoint that is not converted.

    Attributes
    ----------
    family
        `None` where the config names none.
    alike
        Families that read the experts of such a model, all to the same end.
    files, tensors
        How many there are.
    expert_bytes, other_bytes
        Of routed experts, and of all else.
    other_experts
        Expert tensors that stay as they are: of MTP layers, of other parts of the model.
    clamped
        Whether gate and up are clamped to a limit.
    scoring
        The function over the router's logits.
    renormalises
        Whether the weights of a token's experts are made to sum to one; `None`: unknown.
    routing
        What vLLM calls it.
    """

    model_types: tuple[str, ...]
    family: str | None
    alike: tuple[str, ...]
    files: int
    tensors: int
    expert_bytes: int
    other_bytes: int
    other_experts: int
    activation: str | None
    clamped: bool
    scoring: str | None
    renormalises: bool | None
    routing: str | None
    layouts: tuple[LayoutSight, ...]


@dataclass(frozen=True, slots=True)
class ConvertedSight:
    """A converted directory, by its manifest.

    Attributes
    ----------
    tp
        The TP size it is made for; `None` for any.
    partial
        Which part of the model is here; `None` when it is all of it.
    tp_sizes, ep_sizes
        What it serves, of 1, 2, 4, 8, 16 and 32.
    flushed, negative
        Block scales that became zero, and those below zero or NaN, of `scales`.
    unsound
        Global scales that are NaN, infinite, zero or negative.
    restore_bytes
        Bytes that restoring the source needs beside these; `None` where it cannot be restored.
    left_out
        How many source tensors of each part are in no file that an engine reads.
    digests
        How many source files' SHA-256 is known, by where it is from.
    tools
        Versions of what took part.
    """

    layout: str
    version: int
    dtype: str
    tp: int | None
    partial: str | None
    source: str
    family: str
    expert_bytes: int
    other_bytes: int
    restore_bytes: int | None
    files: int
    tp_sizes: tuple[int, ...]
    ep_sizes: tuple[int, ...]
    scales: int
    flushed: int
    negative: int
    unsound: int
    left_out: dict[str, int]
    digests: dict[str, int]
    tools: dict[str, str]
    engines: tuple[EngineSight, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `moeconv inspect` finds.

    Attributes
    ----------
    event
        Always `inspection`.
    checkpoint, converted
        One of them, by what the directory is; both `None` where it cannot be read.
    groups
        The routed experts.
    findings
        All that stands against a conversion.
    warnings
        What is odd, but harmless.
    """

    event: str
    root: str
    name: str
    checkpoint: CheckpointSight | None
    converted: ConvertedSight | None
    groups: tuple[Group, ...]
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """Say whether something can be made of it: 0, or the code of what stands against it."""
        if self.findings:
            return self.findings[0].code
        layouts = self.checkpoint.layouts if self.checkpoint else ()
        is_hopeless = self.checkpoint is not None and all(it.answer == "no" for it in layouts)
        return UnsupportedError.exit_code if is_hopeless else 0


def groups_of(rows: Iterable[tuple[int, tuple[Kind, str], int]]) -> tuple[Group, ...]:
    """Group layers whose experts are of one sort and stored alike."""
    found: dict[tuple[Kind, str], list[tuple[int, int]]] = {}
    for layer, key, nbytes in rows:
        found.setdefault(key, []).append((layer, nbytes))
    return tuple(
        Group(
            layers=_ranges([layer for layer, _ in layers]),
            count=len(layers),
            scheme=kind.scheme,
            experts=kind.experts,
            hidden=kind.hidden,
            intermediate=kind.intermediate,
            gated=kind.gated,
            order=order,
            nbytes=sum(nbytes for _, nbytes in layers),
        )
        for (kind, order), layers in found.items()
    )


def _ranges(numbers: list[int]) -> str:
    """Return `0, 1, 2, 5` as `0-2, 5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def engine_sight(answer: Answer, start: str | None = None) -> EngineSight:
    """Return what an engine says to a model, and how it is started on it."""
    engine = answer.engine
    return EngineSight(
        engine=engine.name,
        versions=engine.versions,
        flags=engine.backend,
        answer=answer.word,
        reasons=answer.reasons,
        needs=answer.needs,
        start=start,
    )


def common_sizes(sizes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sizes that all have."""
    every = list(map(set, sizes))
    return tuple(sorted(set[int].intersection(*every))) if every else ()
