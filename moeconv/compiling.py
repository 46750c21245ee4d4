"""Loops that numba compiles. Imported where they are: numba takes its time, and is optional.

Importing this fails, as where numba is not installed, if numba is told not to compile: loops by
Python itself are no use, and some call what Python cannot.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import config, njit

_Loop = TypeVar("_Loop", bound=Callable[..., Any])

if config.DISABLE_JIT:
    message = "numba is told not to compile"
    raise ImportError(message)


def compiled(loop: _Loop) -> _Loop:
    """Return a loop that other threads run beside, compiled when it is first called.

    The code is kept for other processes if there is a place for it, beside the loop's or below the
    user's home. In a container there may be none, a disk may be full, and what a crash left there
    may be broken: all that is no reason not to convert.
    """
    options = {"nogil": True, "error_model": "numpy"}
    alone: _Loop = njit(loop, **options)
    try:
        chosen: _Loop = njit(loop, cache=True, **options)
    except RuntimeError:
        return alone

    @functools.wraps(loop)
    def call(*args: object) -> object:
        nonlocal chosen
        try:
            return chosen(*args)
        except (OSError, EOFError, pickle.UnpicklingError):
            chosen = alone  # from now on; loops raise nothing, so this one has not begun
            return chosen(*args)

    return cast("_Loop", call)
