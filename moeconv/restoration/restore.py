"""Can I have my checkpoint back? Every file of it, byte for byte, from the converted directory.

Files appear under their names when they are whole and durable, and every piece of them was held to
the digest of what was converted: what is restored is the source or nothing.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moeconv.conversion.pipeline import Moved
from moeconv.errors import OutputError, UnsupportedError, VerifyError
from moeconv.output.codec import read_manifest
from moeconv.output.directory import OutputDirectory
from moeconv.output.durable import GrowingFile, write_file
from moeconv.output.files import Files
from moeconv.output.manifest import Manifest
from moeconv.output.names import WORK_FOLDER, kept_name
from moeconv.output.place import check_path
from moeconv.paths import is_below, sha256_of
from moeconv.restoration.origin import checkpoint_again, plan_again
from moeconv.restoration.proof import Proof
from moeconv.restoration.reassembly import DAMAGED, Reassembly

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.layouts.verbs import Kernels
    from moeconv.output.manifest import FileEntry, SidecarEntry


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored.

    Attributes
    ----------
    files, side_files, nbytes
        Weight files and indexes, all other files, and the bytes of the first.
    resumed
        Weight files and indexes that an earlier run restored: they were read, and are right.
    redone
        Those that were not, and were written again.
    already
        All of it was there, and nothing was written.
    """

    files: int
    side_files: int
    nbytes: int
    resumed: int = 0
    redone: tuple[str, ...] = ()
    already: bool = False


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The files of the source: sizes of weights and indexes, and what is kept of the others."""

    sizes: dict[str, int]
    side_files: dict[str, FileEntry]

    @property
    def result(self) -> Restored:
        """What is restored when all is."""
        return Restored(len(self.sizes), len(self.side_files), sum(self.sizes.values()))


def bytes_to_restore(manifest: Manifest) -> int:
    """Return the size of all weight files and indexes of the source."""
    names = {file.name for file in manifest.source.files}
    kept = manifest.restore.kept if manifest.restore else ()
    indexes = sum(entry.end - entry.begin for entry in kept if entry.source not in names)
    return sum(file.size for file in manifest.source.files) + indexes


def restore(root: Path, kernels: Kernels, out: Path) -> Iterator[Moved | Restored]:
    """Write the checkpoint that a directory was converted from; yields bytes, the result last.

    Files appear under their names when they are whole and durable; the same call goes on after a
    crash, and reads again what it finds. Weight files that the conversion did not read are not
    among them.

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
        `out` cannot be written, holds anything else, or lies in `root`.
    VerifyError
        A file is damaged, or does not belong here.
    """
    manifest = read_manifest(root)
    sidecar = _sidecar(root, manifest)
    check_path(out)
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
        wanted = _wanted(manifest, checkpoint)
        proof = Proof(manifest, checkpoint)
        if _is_whole(out, wanted):
            yield from _check_whole(out, wanted, proof)
            return
        identity = {"restored from": manifest.plan_id}
        directory = OutputDirectory(out, _restore_id(manifest.plan_id), identity)
        _check_foreign(out, wanted)
        _check_space(out, wanted.sizes)
        with directory.claim(0) as is_mine, Files(out) as there:
            if not is_mine:
                message = f"another run is restoring to `{out}`"
                raise OutputError(message, hint="wait for it")
            result = yield from _fill(directory, wanted, work, proof, there)
            for name in checkpoint.side_files:
                chunks = checkpoint.origin.chunks(kept_name(name))
                write_file(out / name, chunks, directory.temporary(0).parent)
    directory.clean()
    yield result


def _fill(
    directory: OutputDirectory, wanted: _Wanted, work: Reassembly, proof: Proof, there: Files
) -> Generator[Moved, None, Restored]:
    """Write weight files and indexes, but for those that are there and are right."""
    resumed, redone = 0, []
    for number, (name, size) in enumerate(wanted.sizes.items()):
        if _is_there(directory.root / name, size):
            if (yield from proof.holds(there, name, size)):
                resumed += 1
                continue
            redone.append(name)
        final = directory.root / name
        with GrowingFile(directory.temporary(number), final, size) as file:
            yield from work.fill(file, name)
            file.keep()
    return replace(wanted.result, resumed=resumed, redone=tuple(redone))


def _wanted(manifest: Manifest, checkpoint: Checkpoint) -> _Wanted:
    """Return the source's files; refuse names from somebody else that lead out of a directory."""
    sizes = {**{file.name: file.size for file in checkpoint.files}, **checkpoint.indexes}
    names = (*sizes, *checkpoint.side_files)
    outside = next((name for name in names if not is_below(name)), None)
    if outside is not None:
        message = f"the manifest names the source file `{ascii(outside)[1:-1]}`, outside of it"
        raise VerifyError(message, hint="do not trust this directory")
    kept = {entry.path: entry for entry in manifest.files}
    lacking = next((name for name in checkpoint.side_files if kept_name(name) not in kept), None)
    if lacking is not None:
        message = f"the manifest does not hold `{lacking}`, a small file of the source"
        raise VerifyError(message, hint=DAMAGED)
    return _Wanted(sizes, {name: kept[kept_name(name)] for name in checkpoint.side_files})


def _is_whole(out: Path, wanted: _Wanted) -> bool:
    """Say whether a directory has every file of the source, and no run is at work in it."""
    is_at_work = (out / WORK_FOLDER).exists()
    sizes = {**wanted.sizes, **{name: entry.size for name, entry in wanted.side_files.items()}}
    return not is_at_work and all(_is_there(out / name, size) for name, size in sizes.items())


def _check_whole(out: Path, wanted: _Wanted, proof: Proof) -> Iterator[Moved | Restored]:
    """Read all files of a directory that was restored before, or is the source itself."""
    _check_foreign(out, wanted)
    with Files(out) as there:
        for name, size in wanted.sizes.items():
            if not (yield from proof.holds(there, name, size)):
                raise _other(name, out)
        for name, entry in wanted.side_files.items():
            if not _is_equal(out / name, entry.sha256):
                raise _other(name, out)
    yield replace(wanted.result, resumed=len(wanted.sizes), already=True)


def _is_equal(path: Path, sha256: str) -> bool:
    try:
        return sha256_of(path) == sha256
    except OSError:
        return False


def _other(name: str, out: Path) -> VerifyError:
    message = f"`{name}` in `{out}` is not what was converted; nothing there was touched"
    return VerifyError(
        message, hint="remove that directory if it is yours, or give another `--out`"
    )


def _check_foreign(out: Path, wanted: _Wanted) -> None:
    """Refuse a directory with a file that is not of the source."""
    known = {*wanted.sizes, *wanted.side_files}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out)
        is_ours = name.parts[0] == WORK_FOLDER or str(name) in known
        if not is_ours and (path.is_symlink() or not path.is_dir()):
            message = f"`{out}` holds `{name}`, which is not of the checkpoint"
            raise OutputError(message, hint="move it away, or give another `--out`")


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
