"""Can I have my checkpoint back? Every file of it, byte for byte, from the converted directory.

Files appear under their names when they are whole and durable, and every piece of them was held to
the digest of what was converted: what is restored is the source or nothing.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moeconv.conversion.pipeline import Moved
from moeconv.errors import OutputError, UnsupportedError, VerifyError
from moeconv.output.codec import read_manifest
from moeconv.output.directory import OutputDirectory
from moeconv.output.durable import GrowingFile, write_file
from moeconv.output.files import Files
from moeconv.output.manifest import Manifest
from moeconv.output.names import kept_name
from moeconv.paths import is_below
from moeconv.restoration.origin import checkpoint_again, plan_again
from moeconv.restoration.reassembly import DAMAGED, Reassembly

if TYPE_CHECKING:
    from moeconv.layouts.verbs import Kernels
    from moeconv.output.manifest import SidecarEntry


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored: weight files and indexes, those of them that were there, side files."""

    files: int
    resumed: int
    side_files: int
    nbytes: int


def bytes_to_restore(manifest: Manifest) -> int:
    """Return the size of all weight files of the source."""
    return sum(file.size for file in manifest.source.files)


def restore(root: Path, kernels: Kernels, out: Path) -> Iterator[Moved | Restored]:
    """Write the checkpoint that a directory was converted from; yields bytes, the result last.

    Files appear under their names when they are whole and durable; the same call goes on after a
    crash. Weight files that the conversion did not read are not among them.

    Parameters
    ----------
    root
        The converted directory.
    kernels
        What inverts the layout.
    out
        Where to; made if it is not there.

    Raises
    ------
    SourceError
        There is no manifest.
    UnsupportedError
        The directory does not hold the whole source, or its layout is not known to this version.
    OutputError
        `out` cannot be written, is not empty and not this restore's, or lies in `root`.
    VerifyError
        A file is damaged, or does not belong here.
    """
    manifest = read_manifest(root)
    sidecar = _sidecar(root, manifest)
    if out.resolve().is_relative_to(root.resolve()):
        message = f"`{out}` lies in the converted directory `{root}`"
        raise OutputError(message, hint="give an `--out` elsewhere")
    with Files(root) as files:
        checkpoint = checkpoint_again(files, manifest, sidecar)
        plan = plan_again(manifest, checkpoint)
        if plan.id != manifest.plan_id:
            message = f"`{root}` does not hold what was converted: headers, config or plan differ"
            raise VerifyError(message, hint=DAMAGED)
        work = Reassembly(files, manifest, plan, kernels)
        sizes = {**{file.name: file.size for file in checkpoint.files}, **checkpoint.indexes}
        _check_names([*sizes, *checkpoint.side_files])
        identity = {"restored from": manifest.plan_id}
        directory = OutputDirectory(out, _restore_id(manifest.plan_id), identity)
        _check_space(out, sizes)
        resumed = 0
        with directory.claim(0) as is_mine:
            if not is_mine:
                message = f"another run is restoring to `{out}`"
                raise OutputError(message, hint="wait for it")
            for number, (name, size) in enumerate(sizes.items()):
                if _is_there(out / name, size):
                    resumed += 1
                    yield Moved(size if name not in checkpoint.indexes else 0)
                    continue
                with GrowingFile(directory.temporary(number), out / name, size) as file:
                    yield from work.fill(file, name)
                    file.keep()
            for name in checkpoint.side_files:
                chunks = checkpoint.origin.chunks(kept_name(name))
                write_file(out / name, chunks, directory.temporary(0).parent)
    directory.clean()
    side_files = len(checkpoint.side_files)
    yield Restored(len(sizes), resumed, side_files, sum(sizes.values()))


def _sidecar(root: Path, manifest: Manifest) -> SidecarEntry:
    """Return what the sidecar keeps; say why there is none."""
    if manifest.partial:
        message = f"`{root}` cannot be restored: it holds only {manifest.partial} of the model"
        raise UnsupportedError(message, hint="it was made with `--layers`, for a trial")
    if manifest.restore is None:
        lost = ["the headers of the source files, and its index"]
        lost += [f"{count} {part} tensors" for part, count in manifest.left_out.items()]
        lost += ["global scales"] * any("nvfp4" in stack.scheme for stack in manifest.stacks)
        lost += ["block scales"] * any(facts.lossy for facts in manifest.facts)
        message = f"`{root}` cannot be restored: it was made with `--no-sidecar`, so it lacks "
        raise UnsupportedError(message + "; ".join(lost), hint="convert again without that option")
    return manifest.restore


def _check_names(names: Iterable[str]) -> None:
    """Refuse to write where a manifest from somebody else says, but below the directory."""
    outside = next((name for name in names if not is_below(name)), None)
    if outside is not None:
        message = f"the manifest names the source file `{ascii(outside)[1:-1]}`, outside of it"
        raise VerifyError(message, hint="do not trust this directory")


def _restore_id(plan_id: str) -> str:
    return hashlib.sha256(f"restored from {plan_id}".encode()).hexdigest()


def _is_there(path: Path, size: int) -> bool:
    """Say whether an earlier run restored a file: names are given to whole files only."""
    return path.is_file() and path.stat().st_size == size


def _check_space(out: Path, sizes: dict[str, int]) -> None:
    needed = sum(size for name, size in sizes.items() if not _is_there(out / name, size))
    free = shutil.disk_usage(out).free
    if free < needed:
        message = f"`{out}` has {free} bytes free, but {needed} are needed"
        raise OutputError(message, hint="make space, or give an `--out` on another disk")
