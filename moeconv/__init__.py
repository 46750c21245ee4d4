"""Offline pre-conversion of Mixture-of-Experts checkpoints into the layouts that kernels read."""

from __future__ import annotations
