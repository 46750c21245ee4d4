"""A small disk of its own, which breaks while it is written to, and is mended; needs root.

The file system is a real one, in a file, and so are its faults: the errors are the kernel's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

_SIZE_BYTES: Final = 24 << 20
_SHUT_DOWN: Final = 0x8004587D
"""`EXT4_IOC_SHUTDOWN`: from now on every call fails, and what was not made durable is lost."""

_LOSE_LOG: Final = 2
_DETACH: Final = 2
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Disk:
    """An ext4 file system, mounted at a folder.

    Parameters
    ----------
    folder
        Where the file that holds it and the folder that it is mounted at go.
    """

    def __init__(self, folder: Path) -> None:
        self.at, self._image, self._filler = folder / "disk", folder / "image", folder / "disk/full"
        self.at.mkdir(parents=True)
        with self._image.open("wb") as file:
            file.truncate(_SIZE_BYTES)
        make = ["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0", str(self._image)]
        subprocess.run(make, check=True, capture_output=True)
        self._mount()

    def _mount(self) -> None:
        options = ["-o", "loop,errors=remount-ro", str(self._image), str(self.at)]
        subprocess.run(["mount", *options], check=True, capture_output=True)

    def fill(self) -> None:
        """Leave no room."""
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
            for chunk in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while file.write(bytes(chunk)):
                        pass

    def fail(self) -> None:
        """Let every call fail, as when a cable is pulled."""
        fd = os.open(self.at, os.O_RDONLY)
        fcntl.ioctl(fd, _SHUT_DOWN, struct.pack("I", _LOSE_LOG))
        os.close(fd)

    def freeze(self) -> None:
        """Let the kernel find an error in it, upon which it takes no more writes."""
        number = self.at.stat().st_dev
        device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve().name
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a test")

    def vanish(self) -> None:
        """Go, under whoever has files open there."""
        if _LIBC.umount2(os.fsencode(self.at), _DETACH):
            raise OSError(ctypes.get_errno(), "cannot be unmounted", str(self.at))

    def disconnect(self) -> None:
        """Be a file system whose server is gone."""
        server = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
        if _LIBC.mount(b"gone", os.fsencode(self.at), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), "cannot be mounted", str(self.at))
        os.close(server)

    def mend(self) -> None:
        """Be there again, writable, with room."""
        self.close()
        self._mount()
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Be gone for good."""
        with contextlib.suppress(OSError):
            while True:  # what was mounted over it, too
                self.vanish()


FAULTS: Final[dict[str, Callable[[Disk], None]]] = {
    "full": Disk.fill,
    "failing": Disk.fail,
    "read-only": Disk.freeze,
    "unmounted": Disk.vanish,
    "disconnected": Disk.disconnect,
}
"""What a disk may do."""


def can_be_made() -> bool:
    """Say whether this machine lets one make a disk of its own."""
    return not os.geteuid() and None not in map(shutil.which, ("mkfs.ext4", "mount"))
