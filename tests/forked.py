"""The real command in a process of its own, forked where most of its imports are done.

Starting Python and importing numpy and numba takes longer than most conversions here.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
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


class Running:
    """`moeconv` with arguments, run by `main`."""

    def __init__(self, args: list[str], cwd: Path | None, main: Callable[[], None]) -> None:
        self._args = ["moeconv", *args]
        self._folder = tempfile.TemporaryDirectory()
        self._streams = tuple(Path(self._folder.name) / name for name in ("stdout", "stderr"))
        environment = {**os.environ, "NO_COLOR": "1"}
        told = (self._args, cwd, environment, self._streams, main)
        self._process = _CONTEXT.Process(target=_main, args=told)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit status, or that of the signal as a negative number, once it has ended."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self._process.pid or 0, number)

    def ended(self, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Wait for its end, and return exit status, output and messages."""
        self._process.join(timeout_s)
        if self.returncode is None:
            self._process.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self._args, timeout_s)
        out, err = (path.read_text() for path in self._streams)
        self._folder.cleanup()
        return subprocess.CompletedProcess(self._args, self.returncode, out, err)


def _main(
    args: list[str],
    cwd: Path | None,
    environment: dict[str, str],
    streams: tuple[Path, ...],
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
    sys.argv = args
    main()


def _text(fd: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8", write_through=True)
