"""Fuzz one kind of file, led by what of the code an input reaches: `guided.py KIND FOLDER SECONDS`.

The inputs are those of `fuzzing.py`, changed further where a change reached something new. Ends as
libFuzzer does, with how many inputs it ran; one that raises anything but a `MoeconvError` ends it.
"""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path

import atheris

sys.path.append(str(Path(__file__).resolve().parents[1]))  # at the end: moeconv as installed

with atheris.instrument_imports(include=["moeconv"]):
    from tests.fuzzing import changed, targets


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """Change what is JSON here and there; anything else, and a third of the rest, by its bytes."""
    chance = random.Random(seed)
    try:
        if chance.random() < 2 / 3:
            return changed(data, chance)[:most]
    except (ValueError, RecursionError, struct.error):
        pass  # what an earlier change broke
    mutated: bytes = atheris.Mutate(data, most)
    return mutated


def main() -> None:
    """Fuzz for some seconds."""
    kind, folder, seconds = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    target = targets(folder / "files")[kind]
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "sound").write_bytes(target.sound)
    options = [
        *(f"-max_total_time={seconds}", f"-max_len={4 * len(target.sound)}", "-seed=27"),
        # `bounded` has the alarm, and bounds memory.
        *("-handle_alrm=0", "-timeout=0", "-rss_limit_mb=0"),
        *("-print_final_stats=1", f"-artifact_prefix={folder}/"),
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target.read_all, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
