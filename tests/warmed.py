"""Imported where processes are forked: numba loads there, once, the loops that conversions run."""

from __future__ import annotations

from moeconv.kernels.cpu import CpuKernels
from moeconv.layouts import LAYOUTS
from moeconv.layouts.fingerprint import fingerprint
from moeconv.ranges.digests import digest_loop

digest_loop()
for layout in LAYOUTS:
    fingerprint(layout, CpuKernels())
