"""May this engine take this directory, as it was started? Asked before a model is built."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moeconv.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from moeconv.output.manifest import EngineEntry
    from moeconv.serving.reader import ConvertedDirectory


def engine_entry(converted: ConvertedDirectory, engine: str, installed: str) -> EngineEntry:
    """Return the manifest's word on an engine, if the installed version is one that it names.

    Raises
    ------
    UnsupportedError
        The directory is for another engine, or for other versions of it.
    """
    layout = converted.manifest.layout
    entry = next((entry for entry in layout.engines if entry.name == engine), None)
    if entry is None:
        names = " or ".join(entry.name for entry in layout.engines)
        message = f"`{converted.root}` holds the layout {layout.id}, which is for {names}"
        raise UnsupportedError(f"{message}, not for {engine}: convert the checkpoint for {engine}")
    if not _allows(entry.versions, installed):
        message = (
            f"`{converted.root}` holds the layout {layout.id}, which was tested with {engine} "
            f"{entry.versions}; this is {installed}"
        )
        raise UnsupportedError(message)
    return entry


def check_dtype(converted: ConvertedDirectory, dtype: torch.dtype) -> None:
    """Refuse a serving dtype that the bytes were not made for.

    Raises
    ------
    UnsupportedError
        It is another one; the message names the flag.
    """
    found, made_for = str(dtype).removeprefix("torch."), converted.manifest.dtype
    if found != made_for:
        message = f"`{converted.root}` was made for {made_for}, but the engine serves in {found}"
        raise UnsupportedError(f"{message}: start it with `--dtype {made_for}`")


def refuse(root: Path, reasons: Iterable[str | None]) -> None:
    """Raise all reasons at once, if there are any.

    Raises
    ------
    UnsupportedError
        There are.
    """
    given = [reason for reason in reasons if reason]
    if given:
        message = f"`{root}` cannot be loaded as it is wanted: {'; '.join(given)}"
        raise UnsupportedError(message)


def options(given: Mapping[str, object]) -> tuple[int | None, bool]:
    """Return `threads` and `check` of a loader's extra config.

    Raises
    ------
    UnsupportedError
        It has other keys, or values of another kind.
    """
    threads, check = given.get("threads"), given.get("check", False)
    is_number = isinstance(threads, int) and not isinstance(threads, bool) and threads > 0
    if set(given) - {"threads", "check"} or not isinstance(check, bool):
        message = f"the extra config of the loader takes `threads` and `check`, found {dict(given)}"
        raise UnsupportedError(message)
    if threads is not None and not is_number:
        message = (
            f"`threads` of the loader's extra config is {threads!r}, expected a positive number"
        )
        raise UnsupportedError(message)
    return (threads if isinstance(threads, int) else None), check


def _allows(versions: str, installed: str) -> bool:
    """Whether a version is in a range as `>=0.33,<0.34`; suffixes of a version do not count."""
    here = _numbers(installed)
    for part in versions.split(","):
        bound = _numbers(part.lstrip("<>="))
        if part.startswith(">=") and here < bound:
            return False
        if part.startswith("<") and here >= bound:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()
