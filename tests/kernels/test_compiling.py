"""Loops are compiled where numba may, whether or not their code can be kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
from numba import njit

from moeconv.compiling import compiled
from tests import adding, runs
from tests.fp4.models import Model


def twice(x: int) -> int:
    return 2 * x


def test_a_loop_whose_code_nothing_can_keep_is_compiled_each_time():
    """As where neither the package nor the user has a directory to write to."""
    placeless = FunctionType(twice.__code__.replace(co_filename="<nowhere>"), globals())
    with pytest.raises(RuntimeError, match="no locator"):
        njit(placeless, cache=True)
    assert compiled(placeless)(21) == 42


LOOP = """
import resource, sys
from moeconv.compiling import compiled

@compiled
def twice(x):
    return 2 * x

if "full" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
print(twice(21), twice(4))
"""


def test_a_full_disk_and_a_broken_file_are_no_reason_not_to_convert(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(adding.ROOT)}

    def run(*args: str) -> list[Path]:
        command = [sys.executable, tmp_path / "loop.py", *args]
        assert subprocess.check_output(command, env=environment, text=True) == "42 8\n"
        return list(tmp_path.rglob("*.nbc"))

    assert not run("full")
    (kept,) = run()
    for size in (100, 0):
        os.truncate(kept, size)
        run()


def test_numba_that_may_not_compile_is_as_good_as_none(tmp_path):
    source = Model("modelopt", layers=1).write(tmp_path / "source")
    command = ["marlin-fp4", str(source), "--device", "cpu", "--out"]
    runs.invoke(*command, tmp_path / "expected")
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([*runs.COMMAND, *command, str(tmp_path / "out")], env=environment, check=True)
    assert runs.tree(tmp_path / "out") == runs.tree(tmp_path / "expected")
