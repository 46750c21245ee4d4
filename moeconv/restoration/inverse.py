"""Can every source byte be got back? The inverse of each tensor, compared with the source.

The inverse shares row maps and tables with what it undoes, so a sample of experts also has to be
what the engines' own words make of the source: `witness` sees to that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moeconv.checkpoint.reader import Reader, reader_for
from moeconv.conversion.budget import PIECE_BYTES, expert_sizes
from moeconv.conversion.pipeline import Moved
from moeconv.conversion.reading import fill_matrices, spans_of
from moeconv.errors import VerifyError
from moeconv.kernels.scalars import source_scale
from moeconv.layouts.verbs import GlobalScale, is_lossless
from moeconv.planning.jobs import Converted, Passthrough
from moeconv.restoration.origin import locate, plan_again
from moeconv.restoration.sourcefiles import check_source_files
from moeconv.restoration.witness import Witness, Witnessed
from moeconv.sourcing import open_source

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Kernels, Verb
    from moeconv.output.files import Files
    from moeconv.output.manifest import Manifest
    from moeconv.planning.plan import Plan
    from moeconv.tensors import Bytes

_TWO = "one of the two is damaged, or they do not belong together"


@dataclass(frozen=True, slots=True)
class Lost:
    """So many bytes of a part cannot be got back; what is stored is what the source gives."""

    part: str
    nbytes: int


def compare_with_source(
    files: Files, manifest: Manifest, kernels: Kernels, source: str | Path
) -> Iterator[Moved | Lost | Witnessed]:
    """Invert every converted tensor and compare all bytes with the source; yields bytes.

    Where a layout loses bytes (scales that it flushes, global scales), the source is laid out
    again and compared with what is stored, and the bytes that do not come back are counted.

    Raises
    ------
    SourceError
        The source cannot be read.
    VerifyError
        It is another checkpoint, has other files, or some bytes differ.
    """
    checkpoint = open_source(str(source))
    check_source_files(manifest, checkpoint)
    plan = plan_again(manifest, checkpoint)
    where = locate(manifest, plan, source)
    sizes = expert_sizes(plan.jobs)
    wanted = sizes.source, sizes.source, sizes.scratch, sizes.out
    buffers = _Buffers(*(np.empty(size, np.uint8) for size in wanted))
    with reader_for(checkpoint) as reader:
        check, witness = _Check(files, reader, kernels, buffers), Witness(plan, reader)
        for file, tensor in _announced(plan, reader):
            begin = where[file, tensor.name]
            if isinstance(tensor, Passthrough):
                yield from _compare_bytes(files, reader, tensor, file, begin)
                continue
            size = tensor.output.spec.nbytes
            for i, expert in enumerate(tensor.experts):
                stored = buffers.stored[:size]
                files.read(file, begin + i * size, stored)
                yield from check.expert(tensor, expert, plan.verb(tensor, expert), stored)
                expected = buffers.expected[: tensor.output.matrix.nbytes]
                yield from witness.see(tensor, expert, expected, stored)
        witness.finish()


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Reused memory: the source matrix, the inverted one, what is read on the way, the stored."""

    expected: Bytes
    inverted: Bytes
    scratch: Bytes
    stored: Bytes


@dataclass(frozen=True, slots=True)
class _Check:
    """Compares one expert at a time."""

    files: Files
    reader: Reader
    kernels: Kernels
    buffers: _Buffers

    def expert(
        self, tensor: Converted, expert: int, verb: Verb, stored: Bytes
    ) -> Iterator[Moved | Lost]:
        """Invert an expert's bytes and compare; where bytes are lost, lay the source out again."""
        matrix = tensor.output.matrix
        expected = self.buffers.expected[: matrix.nbytes].reshape(matrix.shape)
        inverted = self.buffers.inverted[: matrix.nbytes].reshape(matrix.shape)
        lots = tensor.lots(range(expert, expert + 1))
        deque(fill_matrices(self.reader, lots, expected[None], self.buffers.scratch), maxlen=0)
        if isinstance(verb, GlobalScale):
            source_scale(verb, stored, inverted)
        else:
            self.kernels.invert(verb, stored, inverted)
        if not is_lossless(verb):
            again = np.empty(stored.size, np.uint8)
            self.kernels.lay_out(verb, expected, again)
            if not np.array_equal(again, stored):
                message = f"`{tensor.name}` is not what its source gives for expert {expert}"
                raise VerifyError(message, hint=_TWO)
            windows = (
                np.s_[p.row : p.row + p.part.shape[0], : p.part.shape[1] * p.part.item_bytes]
                for p in tensor.places(expert)
            )  # padding is nobody's loss
            lost = sum(np.count_nonzero(inverted[w] != expected[w]) for w in windows)
            yield Lost(matrix.part, int(lost))
        elif not np.array_equal(inverted, expected):
            raise _difference(tensor, expert, inverted, expected)
        yield Moved(stored.size)


def _announced(plan: Plan, reader: Reader) -> Iterator[tuple[str, Converted | Passthrough]]:
    """Yield every tensor and its shard, a job's behind a word to the reader that they come."""
    for job in plan.jobs:
        with reader.ahead(spans_of(job.tensors, PIECE_BYTES)):
            for tensor in job.tensors:
                yield job.file, tensor


def _compare_bytes(
    files: Files, reader: Reader, tensor: Passthrough, file: str, begin: int
) -> Iterator[Moved]:
    size = tensor.spec.nbytes
    here, there = (np.empty(min(PIECE_BYTES, size), np.uint8) for _ in range(2))
    for at in range(0, size, max(here.nbytes, 1)):
        count = min(here.nbytes, size - at)
        files.read(file, begin + at, here[:count])
        reader.read(tensor.ref, at, there[:count])
        if not np.array_equal(here[:count], there[:count]):
            message = f"`{tensor.name}` in `{file}` differs from the source"
            raise VerifyError(message, hint=_TWO)
        yield Moved(count)


def _difference(tensor: Converted, expert: int, found: Bytes, expected: Bytes) -> VerifyError:
    row, at = (int(i) for i in np.argwhere(found != expected)[0])
    place = next(
        (p for p in reversed(tensor.places(expert)) if p.row <= row), tensor.places(expert)[0]
    )
    message = (
        f"`{tensor.name}` does not give back `{place.part.ref.name}`: expert {expert}, row "
        f"{row - place.row}, byte {at}: expected {expected[row, at]}, found {found[row, at]}"
    )
    return VerifyError(message, hint=_TWO)
