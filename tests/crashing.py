"""Trouble at a point of a conversion, again and again, without starting Python anew for each.

`main` is run in a process of its own, which the others are forks of: it has everything imported
(and no torch), and is told OUT POINTS PROCESSES TROUBLE ARGUMENT... It runs the command ARGUMENT...
`--out` a new folder of OUT. POINTS is how many to try, evenly over the run; 0 is every one. TROUBLE
is `death`, or what a disk may do (`SAID`), or several of them, by turns, with commas between. It
prints as JSON how many points there are and were tried.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeconv.checkpoint.index import open_checkpoint
from moeconv.cli import app
from moeconv.cli import main as moeconv
from moeconv.errors import MoeconvError
from moeconv.kernels.cpu import CpuKernels
from moeconv.output.names import MANIFEST_NAME
from moeconv.serving.reader import open_converted
from moeconv.verification.verify import verify
from tests.disks import FAULTS, Disk

CALLS = (
    *("preadv", "pread", "pwrite", "write", "fsync", "replace", "unlink", "mkdir", "rmdir", "open"),
    *("posix_fallocate", "pwritev", "rename", "copy_file_range"),
)
GROWS = ("pwrite", "write", "mkdir", "posix_fallocate")
"""Calls that a person without quota cannot make."""

SAID = {
    "full": "No space left on device; .* (still|files are) to be written, .* are free|are needed",
    "quota": "Disk quota exceeded; .* (still|files are) to be written",
    "failing": "Input/output error",
    "read-only": "Read-only file system|cannot be written to",
    "unmounted": "No such file or directory|unmounted|is not in",
    "disconnected": "Transport endpoint is not connected",
}
"""What is said of each trouble of a disk; quota is injected, the others are the kernel's own."""

DEAD = 77


class Point:
    """Counts the calls that touch a disk, and brings trouble before one."""

    def __init__(self, at: int, trouble: Callable[[str, Callable[[], object]], None]) -> None:
        self.seen, self.at, self.trouble = 0, at, trouble
        self.lock = threading.Lock()

    def before(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Stand before a system call."""

        def inner(*args: Any, **options: Any) -> Any:
            with self.lock:
                number, self.seen = self.seen, self.seen + 1
            if number == self.at:
                self.trouble(name, lambda: call(args[0], args[1][: len(args[1]) // 2], *args[2:]))
            return call(*args, **options)

        return inner

    def install(self) -> None:
        """Stand before every one of them."""
        for name in CALLS:
            setattr(os, name, self.before(name, getattr(os, name)))


def run_out_of_quota(*_: object) -> None:
    """Refuse to let files grow from now on."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    for name in GROWS:
        setattr(os, name, refuse)


def nothing(*_: object) -> None:
    """Bring no trouble."""


def start(args: list[str], out: Path, log: Path, point: Point | None = None) -> int:
    """Run the command in a fork, and return its process id; its last word is how many calls."""
    child = os.fork()
    if child:
        return child
    point = point or Point(-1, nothing)
    code = 1
    try:
        messages = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(messages, 1)
        os.dup2(messages, 2)
        point.install()
        sys.argv = ["moeconv", *args, "--out", str(out)]
        moeconv()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:  # noqa: BLE001  (a fork has nobody above)
        sys.stderr.write(f"Traceback: {type(error).__name__}: {error}\n")
    finally:
        log.with_suffix(".count").write_text(str(point.seen))
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a fork and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_unfinished(out: Path) -> bool:
    """Say whether something is still to be done."""
    return not out.exists() or ((out / ".moeconv").exists() and not (out / MANIFEST_NAME).exists())


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
    if MANIFEST_NAME in found:  # there is none in what is restored
        said = json.loads(found[MANIFEST_NAME])
        found[MANIFEST_NAME] = {**said, "run": None, "run_digest": None}
    return found


def killed(args: list[str], out: Path, number: int, processes: int) -> None:
    """Die at one point, beside other processes; then run again until all is there."""
    log = out.with_suffix(".log")

    def die(name: str, half: Callable[[], object]) -> None:
        """End as SIGKILL does; every other write has half of its bytes done."""
        if name in {"write", "pwrite"} and number % 2:
            half()
        os._exit(DEAD)

    first = start(args, out, log, Point(number, die))
    codes = [ended(it) for it in (first, *(start(args, out, log) for _ in range(processes - 1)))]
    assert set(codes[1:]) <= {0}, (number, codes, log.read_text())
    assert codes[0] in {DEAD, 0}, (number, codes, log.read_text())
    if processes == 1 and codes[0] == DEAD and is_unfinished(out):
        assert is_refused(out), number
    assert ended(start(args, out, log)) == 0, (number, log.read_text())


def troubled(args: list[str], disk: Disk, number: int, trouble: str) -> None:
    """Have a disk fail at one point: an error in words; mended, the same command ends right."""
    out, log = disk.at / "out", disk.at.parent / "log"
    fault = FAULTS.get(trouble, nothing)

    def strike(*_: object) -> None:
        if (out / ".moeconv" / "plan.json").exists():
            log.with_suffix(".begun").touch()
        run_out_of_quota() if trouble == "quota" else fault(disk)

    ended_with = ended(start(args, out, log, Point(number, strike)))
    said = log.read_text()
    assert "Traceback" not in said, (number, said)
    if ended_with:
        problem = " ".join(said[said.index("error: ") :].split())
        assert ended_with == 5, (number, said)
        assert said.count("error: ") == 1, (number, said)
        assert str(out) in problem, (number, said)
        assert re.search(SAID[trouble], problem), (number, said)
    if trouble == "unmounted" and log.with_suffix(".begun").exists():
        elsewhere = [it for it in disk.at.rglob("*") if it.is_file() and it.stat().st_size]
        assert not elsewhere, (number, elsewhere)
    disk.mend()
    if ended_with and is_unfinished(out):
        assert is_refused(out), number
    assert ended(start(args, out, log)) == 0, (number, log.read_text())


def attempt(
    args: list[str], base: Path, number: int, processes: int, trouble: str
) -> dict[str, Any]:
    """Have trouble at one point, and return what is there in the end."""
    if trouble == "death":
        out = base / str(number)
        killed(args, out, number, processes)
        return tree(out)
    disk = Disk(base / str(number))
    try:
        troubled(args, disk, number, trouble)
        return tree(disk.at / "out")
    finally:
        disk.close()


def main() -> None:
    """Try every point, or some."""
    base, points, processes = Path(sys.argv[1]), *map(int, sys.argv[2:4])
    troubles, args = sys.argv[4].split(","), sys.argv[5:]
    app(
        [*args, "--out", str(base / "warm")], standalone_mode=False
    )  # compiles what forks then have
    whole, log = base / "whole", base / "whole.log"
    assert ended(start(args, whole, log)) == 0, log.read_text()
    count, expected = int(log.with_suffix(".count").read_text()), tree(whole)
    step = max(1, count // points) if points else 1
    tried = range(0, count, step)
    for number, trouble in zip(tried, itertools.cycle(troubles), strict=False):
        assert attempt(args, base, number, processes, trouble) == expected, (number, trouble)
        remove(base / str(number))
    print(json.dumps({"points": count, "tried": len(tried)}))
    sys.stdout.flush()
    assert "torch" not in sys.modules


def remove(folder: Path) -> None:
    """Remove a folder and what is in it."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
