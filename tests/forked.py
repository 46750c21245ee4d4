"""The real command in a process of its own, forked where most of its imports are done.

Starting Python and importing numpy and numba takes longer than most conversions here.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

_IMPORTED: Final = (
    "pytest.__main__",
    "pydantic.type_adapter",
    "tests.forked",
    "moeconv.cli",
    "moeconv.commands.convert",
    "moeconv.commands.converted",
    "moeconv.commands.inspect",
    "tests.warmed",
)
"""Nothing of this starts a thread, or reads the environment that a test sets: the Hub's library is
not among them."""

_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(_IMPORTED))


def run(
    args: list[str], cwd: Path | None, timeout_s: float, main: Callable[[], None]
) -> subprocess.CompletedProcess[str]:
    """Run `moeconv` with arguments by `main`; return its exit status, output and messages."""
    with tempfile.TemporaryDirectory() as folder:
        streams = Path(folder) / "stdout", Path(folder) / "stderr"
        environment = {**os.environ, "NO_COLOR": "1"}
        process = _CONTEXT.Process(target=_main, args=(args, cwd, environment, streams, main))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["moeconv", *args], timeout_s)
        out, err = (path.read_text() for path in streams)
        return subprocess.CompletedProcess(["moeconv", *args], process.exitcode, out, err)


def _main(
    args: list[str],
    cwd: Path | None,
    environment: dict[str, str],
    streams: tuple[Path, Path],
    main: Callable[[], None],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    for fd, path in enumerate((Path(os.devnull), *streams)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, fd)
        os.close(opened)
    sys.stdout = sys.__stdout__ = _text(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2)  # type: ignore[misc]
    if "huggingface_hub" in sys.modules:
        message = "the Hub's library has read the environment of another test"
        raise AssertionError(message)
    sys.argv = ["moeconv", *args]
    main()


def _text(fd: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8", write_through=True)
