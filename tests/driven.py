"""The real command in a process of its own, with a fault: `driven.py FAULT AMOUNT ARGUMENT...`.

`kill N` dies by SIGKILL at the N-th write, fsync or rename; `count 0` prints how many there are;
`slow S` sleeps S seconds at each write; `fsize N` cannot write past N bytes of a file.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

CALLS = ("pwrite", "fsync", "replace")


class Faulty:
    """Stands before a system call."""

    seen = 0

    def __init__(self, name: str) -> None:
        self.name, self.call = name, getattr(os, name)

    def __call__(self, *args: object) -> object:
        if fault == "slow" and self.name == "pwrite":
            time.sleep(amount)
        if fault == "slow" and self.name == "replace" and str(args[1]).endswith(".safetensors"):
            sys.stderr.write(f"renamed {args[1]}\n")
        if fault == "kill" and Faulty.seen == amount:
            os.kill(os.getpid(), signal.SIGKILL)
        Faulty.seen += 1
        return self.call(*args)


# In the background a shell has the tests, and what they start, ignore Ctrl-C; a person's does not.
signal.signal(signal.SIGINT, signal.default_int_handler)
fault, amount = sys.argv[1], float(sys.argv[2])
for call in CALLS:
    setattr(os, call, Faulty(call))
if fault == "fsize":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(amount), int(amount)))
sys.argv = ["moeconv", *sys.argv[3:]]

from moeconv.cli import main  # noqa: E402  (after the faults are set)

try:
    main()
finally:
    if fault == "count":
        print(Faulty.seen)
