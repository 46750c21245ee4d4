"""Is it still true on the Hub? By its own metadata and range reads; nothing is downloaded whole."""

from __future__ import annotations

from collections.abc import Iterator

from moeconv.conversion.pipeline import Moved
from moeconv.errors import SourceError, UnsupportedError
from moeconv.output.contents import by_file
from moeconv.output.hub import Destination, Repository
from moeconv.output.manifest import FileEntry, Manifest
from moeconv.output.names import MANIFEST_NAME
from moeconv.output.remote import RemoteModel
from moeconv.output.tree import Held, holds
from moeconv.verification.digests import Subset, check_digests
from moeconv.verification.structure import fail, strays
from moeconv.verification.verify import Verified


def verify_remote(
    model: RemoteModel, *, read_data: Subset | None = None
) -> Iterator[Moved | Verified]:
    """Verify a converted model on the Hub; yields bytes as they are done, the result last.

    Sizes and SHA-256 of large files are compared with what the Hub says of them, which is what it
    checks its own bytes against; headers are read, a range of each file.

    Parameters
    ----------
    model
        The model, at one commit.
    read_data
        Compute these digests again; `None` for none.

    Raises
    ------
    SourceError
        The Hub refuses, or stays away.
    VerifyError
        Something differs.
    """
    manifest = model.manifest
    fail([problem for entry in manifest.files for problem in _file_problems(model, entry)])
    problems = []
    for file, entries in by_file(manifest).items():
        said = {(e.name, e.dtype, e.shape, e.begin, e.end) for e in entries}
        odd = sorted({name for name, *_ in model.header(file) ^ said})
        problems += [f"`{name}` in `{file}` is not as `{MANIFEST_NAME}` says" for name in odd]
    found = strays(model.tree, manifest)
    fail([*problems, *found.problems])
    digests = sum(model.tree[entry.path].sha256 is not None for entry in manifest.files)
    if read_data:
        digests = 0
        for done in check_digests(model, manifest, read_data):
            digests += done.digests
            yield Moved(done.nbytes)
    tensors = len(list(manifest.entries()))
    yield Verified(len(manifest.files), tensors, digests, others=found.others)


def _file_problems(model: RemoteModel, entry: FileEntry) -> Iterator[str]:
    held = model.tree.get(entry.path)
    if held is None:
        yield f"`{entry.path}` is missing"
    elif held.size != entry.size:
        yield f"`{entry.path}` has {held.size} bytes, expected {entry.size}"
    elif held.sha256 not in {None, entry.sha256}:
        yield f"`{entry.path}` has SHA-256 {held.sha256}, expected {entry.sha256}"


def compare_source(manifest: Manifest) -> int:
    """Compare what the manifest says of the source's files with what the Hub has there now.

    Nothing of them is read: the manifest keeps sizes and SHA-256 that the Hub gave with the bytes.

    Returns
    -------
    int
        How many files were compared.

    Raises
    ------
    SourceError
        The Hub refuses, or stays away.
    UnsupportedError
        The source was a directory, whose digests nobody has.
    VerifyError
        The source has another file there, or none.
    """
    source = manifest.source
    if source.revision is None or any(file.sha256 is None for file in source.files):
        message = f"the source, `{source.name}`, was not read from the Hub: no digest is known"
        raise UnsupportedError(message, hint="`--source SRC` compares the bytes themselves")
    tree = Repository(Destination(source.name), "", SourceError).files(source.revision)
    fail(
        [
            f"`{file.name}` of `{source.name}` is not what was converted: expected SHA-256 "
            f"{file.sha256} of {file.size} bytes, found {_found(tree.get(file.name))}"
            for file in source.files
            if not holds(tree, file.name, file.size, file.sha256 or "")
        ]
    )
    return len(source.files)


def _found(held: Held | None) -> str:
    return "none" if held is None else f"{held.sha256} of {held.size}"
