"""The real command with a fault, in a process of its own.

`kill N` dies by SIGKILL at the N-th write, fsync or rename; `count 0` prints how many there are;
`slow S` sleeps S seconds at each write; `fsize N` cannot write past N bytes of a file.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable

from moeconv.cli import main as moeconv

CALLS = ("pwrite", "fsync", "replace")


class Faulty:
    """Stands before a system call."""

    seen = 0

    def __init__(self, name: str, fault: str, amount: float) -> None:
        self.name, self.fault, self.amount = name, fault, amount
        self.call: Callable[..., object] = getattr(os, name)

    def __call__(self, *args: object) -> object:
        if self.fault == "slow" and self.name == "pwrite":
            time.sleep(self.amount)
        is_shard = self.name == "replace" and str(args[1]).endswith(".safetensors")
        if self.fault == "slow" and is_shard:
            sys.stderr.write(f"renamed {args[1]}\n")
        if self.fault == "kill" and Faulty.seen == self.amount:
            os.kill(os.getpid(), signal.SIGKILL)
        Faulty.seen += 1
        return self.call(*args)


def main(fault: str, amount: float) -> None:
    """Run the command with a fault."""
    # In the background a shell has its processes ignore Ctrl-C; a person's command does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for call in CALLS:
        setattr(os, call, Faulty(call, fault, amount))
    if fault == "fsize":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(amount), int(amount)))
    try:
        moeconv()
    finally:
        if fault == "count":
            print(Faulty.seen)
