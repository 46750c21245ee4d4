"""Can every source byte be got back? The inverse of each tensor, compared with the source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moeconv.checkpoint.index import open_checkpoint
from moeconv.checkpoint.reader import Reader
from moeconv.errors import UnsupportedError, VerifyError
from moeconv.layouts import LAYOUTS
from moeconv.pipeline import CHUNK_BYTES, Limits, Moved, read_matrix, slot_sizes
from moeconv.plan import Converted, Passthrough, Target, make_plan

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Kernels
    from moeconv.output.files import Files
    from moeconv.output.manifest import Manifest
    from moeconv.plan import Plan
    from moeconv.tensors import Bytes

_NO_LIMIT = Limits(workers=1, max_host_bytes=1 << 62)


def compare_with_source(
    files: Files, manifest: Manifest, kernels: Kernels, source: Path
) -> Iterator[Moved]:
    """Invert every converted tensor and compare all bytes with the source; yields bytes.

    Raises
    ------
    SourceError
        The source cannot be read.
    VerifyError
        It is another checkpoint, or some bytes differ.
    """
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, _target(manifest), manifest.source.family)
    where = _locations(manifest, plan, source)
    sizes = slot_sizes(plan.jobs, _NO_LIMIT)
    found, inverted = np.empty(sizes[0], np.uint8), np.empty(sizes[0], np.uint8)
    scratch, stored = np.empty(sizes[1], np.uint8), np.empty(sizes[2], np.uint8)
    with Reader(checkpoint.root) as reader:
        for tensor in (tensor for job in plan.jobs for tensor in job.tensors):
            file, begin = where[tensor.name]
            if isinstance(tensor, Passthrough):
                yield from _compare_bytes(files, reader, tensor, file, begin)
                continue
            shape, size = tensor.output.matrix.shape, tensor.output.spec.nbytes
            expected = found[: tensor.output.matrix.nbytes].reshape(shape)
            matrix = inverted[: tensor.output.matrix.nbytes].reshape(shape)
            for i, expert in enumerate(tensor.experts):
                files.read(file, begin + i * size, stored[:size])
                kernels.invert(tensor.output.verb, stored[:size], matrix)
                read_matrix(reader, tensor.places(expert), expected, scratch)
                if not np.array_equal(matrix, expected):
                    raise _difference(tensor, expert, matrix, expected)
                yield Moved(size)


def _target(manifest: Manifest) -> Target:
    entry = manifest.layout
    layout = next((x for x in LAYOUTS if (x.id, x.version) == (entry.id, entry.version)), None)
    if layout is None:
        message = f"the layout {entry.id} version {entry.version} is not known to this moeconv"
        raise UnsupportedError(message, hint="install the moeconv that wrote it")
    layers = manifest.plan["layers"]
    first, _, last = layers.partition("-")
    return Target(
        layout,
        entry.fingerprint,
        entry.tp,
        int(manifest.plan["max shard size"]),
        None if layers == "all" else (int(first), int(last)),
    )


def _locations(manifest: Manifest, plan: Plan, source: Path) -> dict[str, tuple[str, int]]:
    """Return where each tensor of the plan is; the manifest must hold exactly these."""
    held = {
        entry.name: (entry.dtype, entry.shape, entry.file, entry.begin)
        for entry in manifest.entries()
    }
    planned = {
        tensor.name: (tensor.spec.dtype, tensor.spec.shape)
        for job in plan.jobs
        for tensor in job.tensors
    }
    odd = sorted(
        name for name in {*held, *planned} if held.get(name, (None,))[:2] != planned.get(name)
    )
    if odd:
        message = f"`{source}` is not what was converted: `{odd[0]}` differs"
        message += f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
        raise VerifyError(message, hint=f"it was made from `{manifest.source.name}`")
    return {name: (file, begin) for name, (_, _, file, begin) in held.items()}


def _compare_bytes(
    files: Files, reader: Reader, tensor: Passthrough, file: str, begin: int
) -> Iterator[Moved]:
    size = tensor.spec.nbytes
    here, there = (np.empty(min(CHUNK_BYTES, size), np.uint8) for _ in range(2))
    for at in range(0, size, max(here.nbytes, 1)):
        count = min(here.nbytes, size - at)
        files.read(file, begin + at, here[:count])
        reader.read(tensor.ref, at, there[:count])
        if not np.array_equal(here[:count], there[:count]):
            message = f"`{tensor.name}` in `{file}` differs from the source"
            raise VerifyError(
                message, hint="one of the two is damaged, or they do not belong together"
            )
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
    return VerifyError(message, hint="one of the two is damaged, or they do not belong together")
