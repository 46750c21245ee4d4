"""What is a plan's id a digest of, and was a plan made of this checkpoint?"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from moeconv.errors import SourceError
from moeconv.output.ownership import differences

if TYPE_CHECKING:
    from moeconv.checkpoint.types import Checkpoint
    from moeconv.families.family import Family
    from moeconv.planning.plan import Plan, Target


def identity_of(checkpoint: Checkpoint, target: Target, family: Family) -> dict[str, str]:
    """Return all that decides the bytes, in words or as digests."""
    files: list[list[str | int | None]] = [
        # A digest that only some runs know of the same directory would make it another plan.
        [
            f.name,
            f.size,
            f.header_sha256,
            f.sha256 if f.is_told else f.probe_xxh3,
        ]
        for f in checkpoint.files
    ]
    files += [[name, size] for name, size in checkpoint.indexes.items()]
    config = json.dumps(checkpoint.config, sort_keys=True)
    layers = "all" if target.layers is None else "{}-{}".format(*target.layers)
    return {
        "source files": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        "source revision": checkpoint.origin.commit or "none",
        "source config": hashlib.sha256(config.encode()).hexdigest(),
        "side files": "\n".join(checkpoint.side_files),
        "family": family.name,
        "layout": f"{target.layout.id} version {target.layout.version}",
        "serving dtype": target.layout.dtype,
        "global scales": "largest" if target.reconciles else "the engine's",
        "fingerprint": json.dumps(dict(target.fingerprint), sort_keys=True),
        "tp": "any" if target.tp is None else str(target.tp),
        "max shard size": str(target.max_shard_bytes),
        "layers": layers,
        "sidecar": "yes" if target.has_sidecar else "no",
    }


def check_made_of(plan: Plan, checkpoint: Checkpoint) -> None:
    """Refuse a plan with a checkpoint that it was not made of, be it of the same names and sizes.

    Raises
    ------
    SourceError
        It is another, or not as it was then.
    """
    now = identity_of(checkpoint, plan.target, plan.family)
    if now != plan.identity:
        message = f"the plan is not of the checkpoint `{checkpoint.name}`, which differs in "
        message += differences(plan.identity, now)
        raise SourceError(message, hint="make a plan of the checkpoint that is to be converted")
