"""Where is each byte of a source file now, and is it still what it was?

It is in a tensor that passed through, in converted experts, whose inverse gives it back, or in the
sidecar. Every piece is held to a digest of the source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import xxhash

from moeconv.checkpoint.reader import put_part
from moeconv.conversion.budget import PIECE_BYTES, expert_sizes
from moeconv.conversion.pipeline import Moved
from moeconv.errors import VerifyError
from moeconv.layouts.verbs import GlobalScale
from moeconv.output.manifest import KeptEntry, WeightEntry
from moeconv.planning.jobs import Converted
from moeconv.restoration.origin import locate

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Part, TensorRef
    from moeconv.layouts.verbs import Kernels
    from moeconv.output.durable import GrowingFile
    from moeconv.output.files import Files
    from moeconv.output.manifest import Manifest
    from moeconv.planning.plan import Plan
    from moeconv.tensors import Bytes

    Range: TypeAlias = tuple[int, int]

DAMAGED: Final = "`moeconv verify OUT --read-data` says which file is damaged"


@dataclass(frozen=True, slots=True)
class _Whole:
    """Bytes of a source file that are stored as they are, from `at` on."""

    entry: KeptEntry | WeightEntry
    at: int


@dataclass(frozen=True, slots=True)
class _Expert:
    """One expert's source matrix, and the converted tensors (one, or one a rank) that give it."""

    expert: int
    tensors: tuple[tuple[str, Converted], ...]


class Reassembly:
    """What goes where, for every source file; and the buffers that all of it passes through.

    Parameters
    ----------
    files, manifest
        The converted directory.
    plan
        By which it was made.
    kernels
        What inverts the layout.

    Raises
    ------
    VerifyError
        The manifest holds other tensors than the plan.
    """

    def __init__(self, files: Files, manifest: Manifest, plan: Plan, kernels: Kernels) -> None:
        self._files, self._manifest, self._plan, self._kernels = files, manifest, plan, kernels
        self._begins = locate(manifest, plan, files.root)
        self._wholes: dict[str, list[_Whole]] = defaultdict(list)
        self._kept: dict[str, list[Range]] = defaultdict(list)
        self._experts: dict[str, list[_Expert]] = defaultdict(list)
        self._list_wholes()
        self._list_experts()
        sizes = expert_sizes(plan.jobs)
        self._stored = np.empty(max(sizes.out, 1), np.uint8)
        self._matrix = np.empty(sizes.source, np.uint8)
        self._piece = np.empty(PIECE_BYTES, np.uint8)

    def fill(self, file: GrowingFile, name: str) -> Iterator[Moved]:
        """Write all bytes of one source file.

        Raises
        ------
        VerifyError
            Some are not what was converted.
        """
        for whole in self._wholes[name]:
            yield from self._copy(file, whole)
        for expert in self._experts[name]:
            for (ref, begin), slab in self._slabs(expert, name).items():
                file.write(ref.begin + begin, slab)
                yield Moved(slab.nbytes)

    def _list_wholes(self) -> None:
        entries = {(entry.file, entry.name): entry for entry in self._manifest.entries()}
        for job in self._plan.jobs:
            for tensor in job.tensors:
                entry = entries[job.file, tensor.name]
                if isinstance(tensor, Converted) or not isinstance(entry, KeptEntry | WeightEntry):
                    continue
                self._wholes[tensor.ref.file].append(_Whole(entry, tensor.ref.begin))
                if isinstance(entry, KeptEntry):
                    end = tensor.ref.begin + tensor.spec.nbytes
                    self._kept[tensor.ref.file].append((tensor.ref.begin, end))
        for ranges in self._kept.values():
            ranges.sort()

    def _list_experts(self) -> None:
        alike: dict[tuple[str, str, tuple[str, ...]], list[tuple[str, Converted]]]
        alike = defaultdict(list)
        for job in self._plan.jobs:
            for tensor in job.tensors:
                if isinstance(tensor, Converted) and not isinstance(
                    tensor.output.verb, GlobalScale
                ):
                    matrix = tensor.output.matrix
                    key = (tensor.stack.prefix, matrix.part, matrix.projections)
                    alike[key].append((job.file, tensor))
        for tensors in alike.values():
            for expert in range(tensors[0][1].stack.geometry.experts):
                mine = tuple(it for it in tensors if expert in it[1].experts)
                found = _Expert(expert, mine)
                for name in self._files_of(found):
                    self._experts[name].append(found)

    def _files_of(self, expert: _Expert) -> set[str]:
        """Return the source files that bytes of an expert go to, where they are not kept whole."""
        parts = (p.part for _, tensor in expert.tensors for p in tensor.places(expert.expert))
        return {part.ref.file for part in parts if not self._is_kept(part)}

    def _is_kept(self, part: Part) -> bool:
        begin, end = (part.ref.begin + at for at in part.span)
        return any(b <= begin and end <= e for b, e in self._overlapping(part.ref.file, begin, end))

    def _overlapping(self, name: str, begin: int, end: int) -> Iterator[Range]:
        """Yield the kept ranges of a source file that have bytes of `[begin, end)`."""
        ranges = self._kept.get(name, [])
        first = bisect_right(ranges, (begin, begin))
        for b, e in ranges[max(first - 1, 0) :]:
            if b >= end:
                return
            if e > begin:
                yield b, e

    def _copy(self, file: GrowingFile, whole: _Whole) -> Iterator[Moved]:
        entry, xxh3 = whole.entry, xxhash.xxh3_128()
        size = entry.end - entry.begin
        for at in range(0, size, PIECE_BYTES):
            piece = self._piece[: min(PIECE_BYTES, size - at)]
            self._files.read(entry.file, entry.begin + at, piece)
            xxh3.update(piece)
            file.write(whole.at + at, piece)
            yield Moved(piece.nbytes)
        if xxh3.hexdigest() != entry.xxh3:
            message = f"`{entry.name}` in `{entry.file}` is damaged"
            raise VerifyError(message, hint=DAMAGED)

    def _slabs(self, expert: _Expert, name: str) -> dict[tuple[TensorRef, int], Bytes]:
        """Return the stored matrices of an expert that a source file has, by tensor and offset."""
        slabs: dict[tuple[TensorRef, int], Bytes] = {}
        for shard, tensor in expert.tensors:
            matrix = self._inverted(shard, tensor, expert.expert)
            for place in tensor.places(expert.expert):
                part = place.part
                if part.ref.file != name or self._is_kept(part):
                    continue
                size = part.matrix_bytes
                key = part.ref, (part.expert or 0) * size
                slab = slabs.setdefault(key, np.empty(size, np.uint8))
                height, width = part.shape
                window = matrix[place.row : place.row + height, : width * part.item_bytes]
                put_part(part, window, slab)
        for (ref, begin), slab in slabs.items():
            self._lay_over(ref, begin, slab)
            self._check(ref, begin, slab)
        return slabs

    def _inverted(self, shard: str, tensor: Converted, expert: int) -> Bytes:
        output = tensor.output
        stored = self._stored[: output.spec.nbytes]
        matrix = self._matrix[: output.matrix.nbytes].reshape(output.matrix.shape)
        number = expert - tensor.experts[0]
        begin = self._begins[shard, tensor.name]
        self._files.read(shard, begin + number * stored.nbytes, stored)
        self._kernels.invert(self._plan.verb(tensor, expert), stored, matrix)
        return matrix

    def _lay_over(self, ref: TensorRef, begin: int, slab: Bytes) -> None:
        """Put what is kept of a matrix over what the inverse gave."""
        first = ref.begin + begin
        for b, e in self._overlapping(ref.file, first, first + slab.nbytes):
            entry = self._kept_entry[ref.file, b]
            low, high = max(b, first), min(e, first + slab.nbytes)
            self._files.read(entry.file, entry.begin + low - b, slab[low - first : high - first])

    @cached_property
    def _kept_entry(self) -> dict[tuple[str, int], KeptEntry]:
        kept = self._manifest.restore.kept if self._manifest.restore else ()
        return {(entry.source, entry.source_begin): entry for entry in kept}

    @cached_property
    def _digests(self) -> dict[str, Sequence[tuple[int, int, str]]]:
        table: dict[str, set[tuple[int, int, str]]] = defaultdict(set)
        for digest in self._manifest.sources:
            table[digest.name].add((digest.begin, digest.end, digest.xxh3))
        return {name: sorted(digests) for name, digests in table.items()}

    def _check(self, ref: TensorRef, begin: int, slab: Bytes) -> None:
        """Compare a matrix with the digests of its bytes as they were converted."""
        end, seen = begin + slab.nbytes, begin
        for first, last, xxh3 in self._digests.get(ref.name, ()):
            if begin <= first and last <= end:
                part = slab[first - begin : last - begin]
                if xxhash.xxh3_128_hexdigest(part) != xxh3:
                    message = f"`{ref.name}` does not come back as it was: bytes {first} to {last}"
                    raise VerifyError(message, hint=DAMAGED)
                seen = max(seen, last) if first <= seen else seen
        if seen < end:
            message = f"the manifest has no digest of `{ref.name}` from byte {seen} on"
            raise VerifyError(message, hint="the manifest was changed; convert again")
