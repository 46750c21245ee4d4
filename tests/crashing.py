"""Die at a point of a conversion, again and again, without starting Python anew for each.

`crashing.py OUT POINTS PROCESSES ARGUMENT...` runs the command ARGUMENT... `--out` a new folder of
OUT. Each process is a fork of this one, which has everything imported (and no torch). POINTS is how
many to try, evenly over the run; 0 is every one. Prints as JSON how many there are and were tried.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeconv.checkpoint.index import open_checkpoint
from moeconv.cli import app
from moeconv.errors import MoeconvError
from moeconv.kernels.cpu import CpuKernels
from moeconv.output.names import MANIFEST_NAME
from moeconv.serving.reader import open_converted
from moeconv.verification.verify import verify

CALLS = (
    *("preadv", "pread", "pwrite", "write", "fsync", "replace", "unlink", "mkdir", "rmdir"),
    *("posix_fallocate", "pwritev", "rename", "copy_file_range"),
)
DEAD = 77


class Point:
    """Counts the calls that touch a disk, and dies at one; a write dies with half of it written."""

    def __init__(self, die_at: int) -> None:
        self.seen, self.die_at = 0, die_at
        self.lock = threading.Lock()

    def before(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Stand before a system call."""

        def inner(*args: Any, **options: Any) -> Any:
            with self.lock:
                number, self.seen = self.seen, self.seen + 1
            if number == self.die_at:
                if name in {"write", "pwrite"} and number % 2:
                    call(args[0], args[1][: len(args[1]) // 2], *args[2:])
                os._exit(DEAD)
            return call(*args, **options)

        return inner

    def install(self) -> None:
        """Stand before every one of them."""
        for name in CALLS:
            setattr(os, name, self.before(name, getattr(os, name)))


def start(args: list[str], out: Path, die_at: int = -1) -> int:
    """Run the command in a fork, and return its process id; its last word is how many calls."""
    child = os.fork()
    if child:
        return child
    point = Point(die_at)
    code = 1
    try:
        log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        point.install()
        app([*args, "--out", str(out)], standalone_mode=False)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:  # noqa: BLE001  (a fork has nobody above)
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        out.with_suffix(".count").write_text(str(point.seen))
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a fork and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_refused(out: Path) -> bool:
    """Say whether no reader takes what a dead run left."""
    uses: tuple[Callable[[], object], ...] = (
        lambda: open_converted(out),
        lambda: list(verify(out, CpuKernels())),
        lambda: open_checkpoint(out),
    )
    for use in uses:
        try:
            use()
        except MoeconvError:
            continue
        return False
    return True


def tree(root: Path) -> dict[str, Any]:
    """Every file by name; of the manifest all but how the run went."""
    found: dict[str, Any] = {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }
    found[MANIFEST_NAME] = {**json.loads(found[MANIFEST_NAME]), "run": None}
    return found


def attempt(args: list[str], out: Path, number: int, processes: int) -> None:
    """Die at one point, beside other processes; then run again until all is there."""
    children = [start(args, out, number), *(start(args, out) for _ in range(processes - 1))]
    codes = [ended(child) for child in children]
    assert set(codes[1:]) <= {0}, (number, codes, out.with_suffix(".log").read_text())
    assert codes[0] in {DEAD, 0}, (number, codes, out.with_suffix(".log").read_text())
    if processes == 1 and codes[0] == DEAD and not (out / MANIFEST_NAME).exists():
        assert is_refused(out), number
    assert ended(start(args, out)) == 0, (number, out.with_suffix(".log").read_text())


def main() -> None:
    """Try every point, or some."""
    base, points, processes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    args = sys.argv[4:]
    app(
        [*args, "--out", str(base / "warm")], standalone_mode=False
    )  # compiles what forks then have
    whole = base / "whole"
    assert ended(start(args, whole)) == 0, whole.with_suffix(".log").read_text()
    count, expected = int(whole.with_suffix(".count").read_text()), tree(whole)
    step = max(1, count // points) if points else 1
    tried = range(0, count, step)
    for number in tried:
        out = base / str(number)
        attempt(args, out, number, processes)
        assert tree(out) == expected, number
        for path in sorted(out.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        out.rmdir()
    print(json.dumps({"points": count, "tried": len(tried)}))
    sys.stdout.flush()
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
