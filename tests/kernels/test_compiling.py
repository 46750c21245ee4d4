"""Loops are compiled where numba may, whether or not their code can be kept."""

from __future__ import annotations

import os
import subprocess
from types import FunctionType

import pytest
from numba import njit

from moeconv.compiling import compiled
from tests import runs
from tests.fp4.models import Model


def twice(x: int) -> int:
    return 2 * x


def test_a_loop_whose_code_nothing_can_keep_is_compiled_each_time():
    """As where neither the package nor the user has a directory to write to."""
    placeless = FunctionType(twice.__code__.replace(co_filename="<nowhere>"), globals())
    with pytest.raises(RuntimeError, match="no locator"):
        njit(placeless, cache=True)
    assert compiled(placeless)(21) == 42


def test_numba_that_may_not_compile_is_as_good_as_none(tmp_path):
    source = Model("modelopt", layers=1).write(tmp_path / "source")
    command = ["marlin-fp4", str(source), "--device", "cpu", "--out"]
    runs.invoke(*command, tmp_path / "expected")
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([*runs.COMMAND, *command, str(tmp_path / "out")], env=environment, check=True)
    assert runs.tree(tmp_path / "out") == runs.tree(tmp_path / "expected")
