"""Imported where processes are forked: numba loads there, once, the loops that conversions run."""

from __future__ import annotations

import numpy as np

from moeconv.kernels.cpu import CpuKernels
from moeconv.layouts import LAYOUTS
from moeconv.layouts.fingerprint import fingerprint
from moeconv.ranges.digests import digest_loop, xxh3_each
from moeconv.ranges.rows import MANY

digest_loop()
xxh3_each([np.zeros((MANY, 1), np.uint8)])
for layout in LAYOUTS:
    fingerprint(layout, CpuKernels())
