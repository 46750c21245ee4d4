"""Do two builds, or a file and an engine, agree on the bytes? Digests of a fixed probe."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np

from moeconv.layouts.layout import Geometry

if TYPE_CHECKING:
    from moeconv.layouts.layout import Layout, Output
    from moeconv.layouts.verbs import Kernels
    from moeconv.tensors import Bytes

PROBE: Final = (
    Geometry(experts=1, hidden=128, intermediate=128, gated=True),
    Geometry(experts=1, hidden=128, intermediate=128, gated=False),
)
"""Sizes that every layout takes without padding: two shuffle units, two K blocks and more."""


def fingerprint(layout: Layout, kernels: Kernels) -> dict[str, str]:
    """Return the SHA-256 of each parameter of the probe, in the engine's order."""
    digests = {}
    for geometry in PROBE:
        if layout.refusal(geometry):
            continue
        for output in layout.outputs(geometry, layout.rank_slice(geometry, 1, 0)):
            out = np.empty(output.spec.nbytes, np.uint8)
            kernels.lay_out(output.verb, probe_matrix(output), out)
            kind = "gated" if geometry.gated else "plain"
            digests[f"{kind}.{output.param}"] = hashlib.sha256(out).hexdigest()
    return digests


def probe_matrix(output: Output) -> Bytes:
    """Return the source matrix of the probe: SHAKE-256 of `moeconv/probe/<param>`, or 1/64."""
    if output.matrix.part == "global_scale":
        return np.full((output.matrix.shape[0], 1), 1 / 64, np.float32).view(np.uint8)
    text = f"moeconv/probe/{output.param}".encode()
    data = hashlib.shake_256(text).digest(output.matrix.nbytes)
    return np.frombuffer(data, np.uint8).reshape(output.matrix.shape).copy()
