"""What was a converted directory made of, and by which plan? From its manifest, made again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from moeconv.checkpoint.header import MAX_HEADER_BYTES, PREFIX_BYTES, header_refs
from moeconv.checkpoint.index import read_config
from moeconv.checkpoint.local import LocalOrigin
from moeconv.checkpoint.types import Checkpoint, SourceFile, TensorRef
from moeconv.errors import UnsupportedError, VerifyError
from moeconv.layouts import find_layout
from moeconv.output.manifest import TensorEntry
from moeconv.planning.jobs import Converted, Passthrough
from moeconv.planning.plan import Target, known_facts, make_plan, stack_entries
from moeconv.planning.sidecar import settle

if TYPE_CHECKING:
    from moeconv.output.files import Files
    from moeconv.output.manifest import Entry, Manifest, SidecarEntry, SourceFileEntry
    from moeconv.planning.plan import Known, Plan

_CHANGED: Final = "the manifest was changed; convert again"


def plan_again(manifest: Manifest, checkpoint: Checkpoint) -> Plan:
    """Return the plan that a manifest tells of, for the checkpoint that it was made for.

    Raises
    ------
    UnsupportedError
        Its layout is not known to this version.
    VerifyError
        The manifest contradicts itself.
    """
    plan = make_plan(checkpoint, target_of(manifest), manifest.source.family)
    return settle(plan, checkpoint, _facts(manifest))


def checkpoint_again(files: Files, manifest: Manifest, sidecar: SidecarEntry) -> Checkpoint:
    """Return the checkpoint that was converted, from the headers that the sidecar keeps.

    Its place is the converted directory, where its bytes are, though not in its files.

    Raises
    ------
    VerifyError
        A header is not there, or not the one that was read.
    """
    tensors: dict[str, TensorRef] = {}
    for file in manifest.source.files:
        for ref in _header(files, file, sidecar):
            tensors.setdefault(ref.name, ref)
    names = {file.name for file in manifest.source.files}
    return Checkpoint(
        origin=LocalOrigin(files.root, commit=manifest.source.revision),
        name=manifest.source.name,
        config=read_config(files.root),
        tensors=tensors,
        files=tuple(
            SourceFile(
                file.name,
                file.size,
                file.header_sha256,
                file.probe_xxh3,
                file.sha256,
                file.sha256_from,
            )
            for file in manifest.source.files
        ),
        side_files=tuple(manifest.plan.get("side files", "").splitlines()),
        indexes={
            kept.source: kept.end - kept.begin for kept in sidecar.kept if kept.source not in names
        },
    )


def _header(files: Files, file: SourceFileEntry, sidecar: SidecarEntry) -> list[TensorRef]:
    kept = next(
        (it for it in sidecar.kept if it.source == file.name and it.source_begin == 0), None
    )
    if kept is not None:
        prefix = np.zeros(PREFIX_BYTES, np.uint8)
        files.read(kept.file, kept.begin, prefix)
        begin = kept.begin + PREFIX_BYTES
        # No larger than it can be, whatever somebody wrote into the manifest.
        most = min(kept.end - begin, MAX_HEADER_BYTES)
        text = np.empty(max(min(int.from_bytes(prefix.tobytes(), "little"), most), 0), np.uint8)
        files.read(kept.file, begin, text)
        if hashlib.sha256(text).hexdigest() == file.header_sha256:
            return header_refs(text.tobytes(), file.name, file.size - PREFIX_BYTES - text.size)
    message = f"the sidecar does not hold the header of `{file.name}`"
    raise VerifyError(message, hint="`moeconv verify --read-data` says which file is damaged")


def _facts(manifest: Manifest) -> Known:
    experts = {stack.prefix: stack.experts for stack in manifest.stacks}
    for entry in manifest.facts:
        if len(entry.ratios) not in {0, experts.get(entry.prefix)}:
            message = f"the manifest holds {len(entry.ratios)} scale ratios of `{entry.prefix}`"
            raise VerifyError(message, hint=_CHANGED)
        for projection, expert in entry.lossy:
            if not 0 <= expert < experts.get(entry.prefix, 0):
                message = f"the manifest names {projection} of expert {expert} of `{entry.prefix}`"
                raise VerifyError(message, hint=_CHANGED)
    return known_facts(manifest.facts)


def target_of(manifest: Manifest) -> Target:
    """Return the target that a manifest was made for.

    Raises
    ------
    UnsupportedError
        Its layout is not known to this version.
    VerifyError
        It does not say what the bytes were decided by.
    """
    entry = manifest.layout
    unsaid = {"global scales", "layers", "max shard size", "sidecar"} - manifest.plan.keys()
    if unsaid:
        message = f"the manifest's plan does not say `{min(unsaid)}`"
        raise VerifyError(message)
    reconciles = manifest.plan["global scales"] == "largest"
    layout = find_layout(entry.id, manifest.dtype, reconciles=reconciles)
    if layout is None or layout.version != entry.version:
        message = f"the layout {entry.id} version {entry.version} is not known to this moeconv"
        raise UnsupportedError(message, hint="install the moeconv that wrote it")
    (most_bytes,) = _numbers(manifest, "max shard size", r"(\d{1,18})")
    return Target(
        layout,
        entry.fingerprint,
        entry.tp,
        most_bytes,
        _layers(manifest),
        reconciles,
        manifest.plan["sidecar"] == "yes",
    )


def _layers(manifest: Manifest) -> tuple[int, int] | None:
    if manifest.plan["layers"] == "all":
        return None
    first, last = _numbers(manifest, "layers", r"(\d{1,9})-(\d{1,9})")
    return first, last


def _numbers(manifest: Manifest, key: str, pattern: str) -> Iterator[int]:
    """Yield the numbers of one of the plan's texts, which somebody may have changed."""
    found = re.fullmatch(pattern, manifest.plan[key], re.ASCII)
    if found is None:
        message = f"the manifest's plan gives `{key}` as {manifest.plan[key][:80]!a}"
        raise VerifyError(message, hint=_CHANGED)
    yield from map(int, found.groups())


def locate(manifest: Manifest, plan: Plan, source: str | Path) -> dict[tuple[str, str], int]:
    """Return where in its file each tensor of a plan starts; the manifest must hold exactly these.

    Raises
    ------
    VerifyError
        The plan, which was made of `source`, has other tensors.
    """
    if manifest.stacks != stack_entries(plan):
        message = f"`{source}` is not what was converted: the manifest has other layers or sizes"
        raise VerifyError(message, hint=f"it was made from `{manifest.source.name}`")
    held = {(entry.file, entry.name): _said(entry) for entry in manifest.entries()}
    planned = {
        (job.file, tensor.name): _meant(tensor) for job in plan.jobs for tensor in job.tensors
    }
    odd = sorted(key for key in {*held, *planned} if held.get(key) != planned.get(key))
    if odd:
        message = f"`{source}` is not what was converted: `{odd[0][1]}` differs"
        message += f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
        raise VerifyError(message, hint=f"it was made from `{manifest.source.name}`")
    return {(entry.file, entry.name): entry.begin for entry in manifest.entries()}


def _said(entry: Entry) -> tuple[object, ...]:
    if not isinstance(entry, TensorEntry):
        return entry.dtype, entry.shape
    where = (entry.prefix, entry.param, entry.rank, entry.first, entry.last)
    return entry.dtype, entry.shape, *where


def _meant(tensor: Converted | Passthrough) -> tuple[object, ...]:
    spec = (tensor.spec.dtype, tensor.spec.shape)
    if isinstance(tensor, Passthrough):
        return spec
    first, last = tensor.experts[0], tensor.experts[-1]
    return *spec, tensor.stack.prefix, tensor.output.param, tensor.rank, first, last
