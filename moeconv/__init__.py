"""Offline pre-conversion of Mixture-of-Experts checkpoints into the layouts that kernels read.

>>> import moeconv
>>> checkpoint = moeconv.open_checkpoint("Qwen3-tiny")
>>> plan = moeconv.make_plan(checkpoint, "trtllm-bf16")
>>> *_, manifest = moeconv.convert(plan, checkpoint, "converted")
>>> manifest.layout.id
'trtllm-bf16'
>>> moeconv.verify("converted", read_data=True, source="Qwen3-tiny").sources
69

A rank of an engine then reads its bytes into memory of its own:

>>> import numpy as np
>>> with moeconv.serving.open("converted") as converted:
...     rank = converted.rank(tp_size=2, tp_rank=1)
...     outs = [np.empty(tensor.nbytes, np.uint8) for tensor in rank.tensors()]
...     rank.read_all(zip(rank.tensors(), outs))
>>> [str(tensor.spec) for tensor in rank.tensors()][:2]
['BF16 [8, 4, 256, 64]', 'BF16 [8, 2, 256, 64]']
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from moeconv import serving as serving
    from moeconv.api import convert as convert
    from moeconv.api import hash_source as hash_source
    from moeconv.api import make_plan as make_plan
    from moeconv.api import open_checkpoint as open_checkpoint
    from moeconv.api import verify as verify
    from moeconv.errors import MoeconvError as MoeconvError

    __version__: str

__all__ = [
    "MoeconvError",
    "convert",
    "hash_source",
    "make_plan",
    "open_checkpoint",
    "serving",
    "verify",
]

_HOMES: Final = {
    **dict.fromkeys(
        ("convert", "hash_source", "make_plan", "open_checkpoint", "verify"), "moeconv.api"
    ),
    "MoeconvError": "moeconv.errors",
}


def __getattr__(name: str) -> object:
    """Import what is asked for: `import moeconv` alone stays quick, for the command line too."""
    if name == "__version__":
        from importlib import metadata

        return metadata.version("moeconv")
    if name == "serving":
        return importlib.import_module("moeconv.serving")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    message = f"module `moeconv` has no attribute `{name}`"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
