"""What do the commands for a converted directory do? One call of the library, then the report."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from moeconv import report
from moeconv.commands.recheck import recheck, recheck_finished
from moeconv.commands.space import telling_what_is_missing
from moeconv.conversion.seal import seal
from moeconv.errors import UnsupportedError
from moeconv.kernels import pick
from moeconv.output.codec import read_manifest
from moeconv.output.directory import OutputDirectory
from moeconv.output.place import errors_below
from moeconv.restoration.restore import Restored, bytes_to_restore, restore
from moeconv.serving import open_converted
from moeconv.shell import typed
from moeconv.sourcing import is_repository
from moeconv.verification.digests import Subset
from moeconv.verification.verify import Verified, bytes_to_move, verify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moeconv.conversion.pipeline import Moved
    from moeconv.output.manifest import Manifest


def run_seal(out: Path, *, rechecks: bool, as_json: bool) -> None:
    """Join shares, and say what was made."""
    if rechecks:
        directory = OutputDirectory.begun(out)
        if directory.finished:
            recheck_finished(out)
        else:
            files = [entry.path for entry in directory.notes.draft().files]
            recheck(directory, files, "has to be done again")
    with errors_below(out):
        manifest = seal(out)
    if as_json:
        report.emit({"event": "done", "out": str(out), "plan_id": manifest.plan_id})
        return
    report.good(f"`{out}` is whole: {report.count(len(manifest.files), 'file')}")
    report.table("", (), commands=[("next", f"moeconv verify {typed(out)} --read-data")])


def run_verify(
    where: str, *, read_data: Subset | None, source: str | None, device: str, as_json: bool
) -> None:
    """Verify a directory or a repository, and say what was found."""
    where, manifest, events = _opened(where, read_data, source, device)
    result = None
    total = bytes_to_move(manifest, read_data=read_data, source=source is not None)
    with report.progress() as bar:
        task = bar.add_task("verifying", total=total)
        for event in events:
            if isinstance(event, Verified):
                result = event
            else:
                bar.advance(task, event.nbytes)
    if result is None:
        message = "verification ended without a result"
        raise AssertionError(message)
    if as_json:
        left_out = {"left_out": manifest.left_out}
        report.emit({"event": "verified", "out": where, **asdict(result), **left_out})
        return
    _show_verified(where, manifest, result, read_data)


def _opened(
    where: str, read_data: Subset | None, source: str | None, device: str
) -> tuple[str, Manifest, Iterator[Moved | Verified]]:
    """Return the whole name of what is verified, its manifest, and the verification to run."""
    root = Path(where)
    if is_repository(where) and not root.exists():
        if source is not None:
            message = f"`{where}` is on the Hub, and is not compared with a checkpoint from here"
            raise UnsupportedError(message, hint="`hf download` it, then compare the copy")
        from moeconv.output.remote import RemoteModel
        from moeconv.verification.remote import verify_remote

        model = RemoteModel(where)
        name = f"{model.name}@{model.commit}"
        return name, model.manifest, verify_remote(model, read_data=read_data)
    events = verify(root, pick(device), read_data=read_data, source=source)
    return where, read_manifest(root), events


def _show_verified(
    where: str, manifest: Manifest, result: Verified, read_data: Subset | None
) -> None:
    if result.others:
        many = f"{len(result.others)} files" if len(result.others) > 1 else "a file"
        report.warn(f"`{where}` holds {many} that moeconv did not write: `{result.others[0]}`")
    if read_data or result.sources:
        report.good(f"`{where}` is as its manifest says")
    else:
        report.good(f"`{where}` has the files and headers its manifest says; data not read")
    report.table(
        "",
        (
            (
                "files",
                f"{result.files} of the right size, {result.tensors} tensors in place",
            ),
            ("digests", _digests(result.digests, read_data)),
            (
                "source",
                f"{report.count(result.sources, 'tensor')} compared, byte for byte"
                if result.sources
                else "not compared (--source SRC)",
            ),
            *([("sample", _witnesses(result))] if result.sources else []),
            *(
                (f"lost of {part}", f"{report.count(count, 'byte')}; the rest is right")
                for part, count in result.lost.items()
            ),
            *(
                (
                    "left out",
                    f"{report.count(count, f'{part} tensor')}, which the kernel does not read",
                )
                for part, count in manifest.left_out.items()
            ),
        ),
    )


def _witnesses(result: Verified) -> str:
    """Say who else laid out a sample of the experts, or that nobody did."""
    equal = [
        f"{report.count(count, 'tensor')} of experts, as {by} lays them out"
        for by, count in result.witnessed.items()
    ]
    absent = (
        [f"{report.count(result.unwitnessed, 'tensor')} not checked by others"]
        if result.unwitnessed
        else []
    )
    return "; ".join([*equal, *absent]) or "nothing to check"


def _digests(equal: int, subset: Subset | None) -> str:
    if subset is None:
        return "not read (--read-data)"
    part = f", part {subset.part} of {subset.of}" if subset.of > 1 else ""
    return f"{equal} equal{part}"


def run_compare_source(where: str, *, as_json: bool) -> None:
    """Compare the digests of the source that are kept with those that the Hub has of it."""
    from moeconv.output.remote import RemoteModel
    from moeconv.verification.remote import compare_source

    is_here = Path(where).exists() or not is_repository(where)
    manifest = read_manifest(Path(where)) if is_here else RemoteModel(where).manifest
    count, source = compare_source(manifest), manifest.source
    if as_json:
        name = f"{source.name}@{source.revision}"
        report.emit({"event": "source compared", "source": name, "files": count})
        return
    report.good(f"`{source.name}` has the {report.count(count, 'file')} that made it, by SHA-256")


def run_rank(root: Path, *, tp: tuple[int, int], ep: tuple[int, int], as_json: bool) -> None:
    """Show what a rank reads."""
    with open_converted(root, allow_partial=True) as converted:
        view = converted.rank(tp_size=tp[0], tp_rank=tp[1], ep_size=ep[0], ep_rank=ep[1])
        if as_json:
            for tensor in view.tensors():
                report.emit(
                    {
                        "event": "tensor",
                        "prefix": tensor.prefix,
                        "param": tensor.param,
                        "dtype": tensor.spec.dtype,
                        "shape": list(tensor.spec.shape),
                        "bytes": tensor.nbytes,
                        "read_bytes": tensor.read_bytes,
                    }
                )
            return
        rows = [
            (
                str(tensor.layer),
                tensor.param,
                str(tensor.spec),
                f"{tensor.experts.start}-{tensor.experts.stop - 1}",
                report.size(tensor.placement.end - tensor.placement.begin),
            )
            for tensor in view.tensors()
        ]
        title = f"TP rank {tp[1]} of {tp[0]}, EP rank {ep[1]} of {ep[0]}"
        report.grid(title, ("layer", "parameter", "shape", "experts", "bytes an expert"), rows)
        reads = sum(tensor.read_bytes for tensor in view.tensors())
        held = sum(entry.end - entry.begin for entry in converted.manifest.tensors)
        whose = "each expert" if ep[0] == 1 else f"each of 1/{ep[0]} of the experts"
        part = f"{whose} whole" if tp[0] == 1 else f"one of {tp[0]} parts of {whose}"
        report.note(f"this rank reads {report.size(reads)} of {report.size(held)}: {part}")
        if converted.manifest.partial:
            report.warn(f"`{root}` holds only {converted.manifest.partial} of the model")


def _left_to_restore(manifest: Manifest, out: Path) -> int:
    """Return the bytes of weight files that are not there yet."""
    return sum(file.size for file in manifest.source.files if not (out / file.name).exists())


def run_restore(root: Path, out: Path, *, device: str, as_json: bool) -> None:
    """Write the source back, and say what was written."""
    result: Restored | None = None
    started_s = time.monotonic()
    manifest = read_manifest(root)
    with (
        errors_below(out),
        telling_what_is_missing(out, lambda: _left_to_restore(manifest, out)),
        report.progress() as bar,
    ):
        task = bar.add_task("restoring", total=bytes_to_restore(manifest))
        for event in restore(root, pick(device), out):
            if isinstance(event, Restored):
                result = event
            else:
                bar.advance(task, event.nbytes)
    if result is None:
        message = "restoring ended without a result"
        raise AssertionError(message)
    seconds = time.monotonic() - started_s
    for name in result.redone:
        report.warn(f"`{name}` of an earlier run was damaged, and was written again")
    if as_json:
        report.emit({"event": "restored", "out": str(out), **asdict(result)})
        return
    if result.already:
        report.good(f"`{out}` is already restored: byte for byte what was converted")
    else:
        report.good(f"restored to `{out}`: byte for byte what was converted")
    there = f", {result.resumed} of which were there" if result.resumed else ""
    report.table(
        "",
        (
            ("weights", f"{result.files} files and indexes, {report.size(result.nbytes)}{there}"),
            ("other files", str(result.side_files)),
            ("time", f"{seconds:.1f} s, {report.rate(result.nbytes / max(seconds, 1e-9))}"),
        ),
    )
