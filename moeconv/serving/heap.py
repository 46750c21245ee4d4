"""What does a garbage collection look at while a model loads? Only at what the load itself made.

vLLM collects twice in every load, so that nothing dead holds GPU memory. Each time Python walks all
objects of a process that has imported an engine, which takes longer than the experts' transform.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Leave the objects that are there already out of collections, until the block ends.

    Afterwards none is left out, whoever had frozen it: Python has one such list for a process.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
