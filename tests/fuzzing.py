"""Inputs that nobody meant, and what each of them must do: give a result, or a `MoeconvError`.

Each target takes the bytes of one file, puts them among sound ones and reads it all as commands
do. Not a traceback, not more than a gigabyte, not more than ten seconds.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moeconv.checkpoint.header import read_header
from moeconv.checkpoint.index import open_checkpoint
from moeconv.conversion.budget import Limits
from moeconv.conversion.convert import convert
from moeconv.conversion.seal import seal
from moeconv.errors import MoeconvError
from moeconv.inspection.inspect import inspect_source
from moeconv.kernels.cpu import CpuKernels
from moeconv.output.directory import OutputDirectory
from moeconv.planning.experts import find_experts
from moeconv.planning.recognition import pick_family
from moeconv.serving import open_converted
from moeconv.share import Share
from moeconv.verification.digests import Subset
from moeconv.verification.verify import verify
from tests import runs
from tests.sources import Tiny, write_tiny

INDEX: Final = "model.safetensors.index.json"
_MOST_S: Final = 10
_MOST_BYTES: Final = 1 << 30
_ODD: Final[tuple[Any, ...]] = (
    None, True, 0, -1, 1, 7, 64, 2**31, 2**63, -(2**63), 2**64, 10**30, 10**12, 0.5, -0.0, 1e308,
    float("inf"), float("nan"), "", "a", "0", "-1", "..", "../x", "/etc/passwd", "a\0b", "\ud800",
    "é" * 300, "config.json", "experts", "layers 0-0", "x.safetensors", "BF16", "F4", "I32",
    [], [0], [-1, 4], [2**62, 4], [[]], {}, {"a": 1}, ["moe"], [None] * 40, {"": {}},
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A file, where it lies, what is there when it is sound, and what reads it."""

    root: Path
    name: str
    sound: bytes
    read: Callable[[Path], object]

    def read_all(self, data: bytes) -> str:
        """Put the bytes there and read; return the kind of the error, or `read`."""
        (self.root / self.name).write_bytes(data)
        try:
            with bounded():
                self.read(self.root)
        except MoeconvError as error:
            return type(error).__name__
        return "read"


@contextmanager
def bounded() -> Iterator[None]:
    """Bound time and memory of a block."""

    def late(*_: object) -> None:
        message = f"took more than {_MOST_S} s"
        raise TimeoutError(message)

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _MOST_BYTES, before[1]))
    signal.signal(signal.SIGALRM, late)
    signal.alarm(_MOST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def targets(folder: Path) -> dict[str, Target]:
    """Make a tiny checkpoint and its conversion, and return what of them is put to the test."""
    tiny = Tiny(experts=2, layers=1, shards=1, hidden=64, intermediate=128)
    source = write_tiny(folder / "source", tiny)
    (header,) = source.glob("*.safetensors")
    out = runs.run(source, folder / "out", runs.Wanted())
    (shard,) = out.glob("experts/*")
    where = {
        "header": (source, header.name, _read_header),
        "index": (write_tiny(folder / "index", tiny), INDEX, _read_checkpoint),
        "config": (write_tiny(folder / "config", tiny), "config.json", _read_checkpoint),
        "manifest": (out, "moeconv.json", _read_converted),
        "converted-config": (_copy(out, folder / "configured"), "config.json", _read_converted),
        "converted-header": (
            _copy(out, folder / "sharded"),
            f"experts/{shard.name}",
            _read_converted,
        ),
    }
    begun = _begun(source, folder / "begun")
    notes = {"plan": "plan.json", "draft": "draft.json", "record": "records/0.json"}
    where |= {kind: (begun, f".moeconv/{name}", _seal) for kind, name in notes.items()}
    return {
        kind: Target(root, name, (root / name).read_bytes(), read)
        for kind, (root, name, read) in where.items()
    }


def changed(sound: bytes, chance: random.Random) -> bytes:
    """Change a file: its JSON here and there, its bytes, or its length."""
    is_header = not sound.startswith(b"{")
    length = struct.unpack("<Q", sound[:8])[0] if is_header else len(sound)
    text, rest = (sound[8 : 8 + length], sound[8 + length :]) if is_header else (sound, b"")
    if chance.random() < 0.85:
        value = json.loads(text)
        for _ in range(chance.randint(1, 3)):
            value = _change(value, chance)
        text = json.dumps(value).encode()
        if chance.random() < 0.1:
            text = _doubled(text, chance)
    for _ in range(chance.choice((0, 0, 0, 1, 2, 8))):
        text = _damaged(text, chance)
    if not is_header:
        return text
    said = len(text) if chance.random() < 0.9 else chance.choice((0, 1, length, 2**40, 2**64 - 1))
    return struct.pack("<Q", said) + text + rest[: chance.choice((len(rest),) * 9 + (0,))]


def _change(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return copy.deepcopy(chance.choice(_ODD))
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = chance.choice(keys)
    match chance.randrange(8):
        case 0:
            del value[key]
        case 1 if isinstance(value, dict):
            value[str(chance.choice(_ODD))] = copy.deepcopy(value[key])
        case 1 if isinstance(value, list):
            value.append(copy.deepcopy(value[key]))
        case 2:
            value[key] = copy.deepcopy(value[chance.choice(keys)])
        case _:
            value[key] = _change(value[key], chance)
    return value


def _doubled(text: bytes, chance: random.Random) -> bytes:
    """Give a key a second time."""
    at = text.find(b'"', chance.randrange(len(text)))
    return text[:at] + b'"format": 1, "shape": [], ' + text[at:] if at > 0 else text * 2


def _damaged(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text) + 1)
    match chance.randrange(4):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
        case 2:
            return (
                text[:at]
                + chance.choice((b"[" * 5000, b"9" * 5000, b"\xff", b'"', b"\\ud800"))
                + text[at:]
            )
        case _:
            return text[:at] + text[at + chance.randrange(64) :]


def _copy(root: Path, target: Path) -> Path:
    return Path(shutil.copytree(root, target))


def _begun(source: Path, out: Path) -> Path:
    """Make a directory in which everything is done but to seal it."""
    plan, checkpoint = runs.plan(source)
    directory = OutputDirectory(out, plan.id, plan.identity)
    only = Limits(1, 1 << 30, share=Share(only=True))
    for _ in convert(plan, checkpoint, directory, CpuKernels(), only):
        pass
    return out


def _seal(root: Path) -> None:
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        seal(_copy(root, Path(folder) / "out"))


def _read_header(root: Path) -> None:
    for path in root.glob("*.safetensors"):
        read_header(root, path.name)


def _read_checkpoint(root: Path) -> None:
    inspect_source(str(root))
    checkpoint = open_checkpoint(root)
    find_experts(checkpoint, pick_family(checkpoint, None))


def _read_converted(root: Path) -> None:
    inspect_source(str(root))
    with open_converted(root, allow_partial=True) as converted:
        for tp, ep in ((1, 1), (2, 1), (1, 2)):
            view = converted.rank(tp_size=tp, ep_size=ep)
            [tensor.nbytes for tensor in view.tensors()]
    for _ in verify(root, CpuKernels(), read_data=Subset()):
        pass
