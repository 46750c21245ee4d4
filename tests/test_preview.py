"""`--dry-run`: what a conversion would cost, and all that stands against it at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from moeconv.cli import app
from moeconv.errors import MoeconvError
from moeconv.output.records import ShardRecord
from tests import runs
from tests.fp4.models import Model


def dry(*args):
    """Return exit code, JSON and what was said."""
    result = CliRunner().invoke(app, [*map(str, args), "--dry-run", "--json"])
    if isinstance(result.exception, MoeconvError):
        return result.exception.exit_code, None, str(result.exception)
    return result.exit_code, json.loads(result.stdout), result.stderr


def test_costs(source, tmp_path):
    code, plan, _ = dry("trtllm", source, "--out", tmp_path / "out")
    assert (code, plan["event"]) == (0, "plan")
    assert plan["seconds"] >= 0
    assert plan["bytes_per_s"] > 0
    assert plan["host_bytes"] > plan["buffer_bytes"] > 0
    assert plan["device_bytes"] == 0
    assert plan["free_bytes"] > plan["expert_bytes"] == 2 * 4 * 3 * 128 * 128 * 2
    result = CliRunner().invoke(app, ["trtllm", str(source), "--dry-run"])
    shown = " ".join(result.stdout.split())
    assert "an estimate, from laying out 393.2 kB of experts and trying the disk" in shown
    assert "peak memory" in shown
    assert "for restore 5.8 kB, which no engine reads" in shown
    assert "798.6 kB are needed" in shown


@pytest.mark.parametrize("kind", ["modelopt", "ct", "gptoss", "deepseek", "nemotron"])
def test_every_kind_of_fp4_is_measured(kind, tmp_path):
    source = Model(kind).write(tmp_path / "source")
    code, plan, words = dry("marlin-fp4", source, "--out", tmp_path / "out")
    assert code == 0, words
    assert plan["bytes_per_s"] > 0
    assert not (tmp_path / "out").exists()


def test_all_obstacles_at_once(source, tmp_path, monkeypatch):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "x").touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    code, seen, words = dry("trtllm", source, "--out", foreign, "--max-host-memory", "1kB")
    assert (code, seen["event"]) == (4, "refused")
    assert [finding["code"] for finding in seen["findings"]] == [4, 5, 5]
    for text in (
        "does not hold one expert",
        "not a moeconv directory",
        "10 bytes free, but 792.8 kB",
    ):
        assert text in words
        assert any(text in finding["message"] for finding in seen["findings"])


def test_layers_that_do_not_fit_are_found_together(tmp_path):
    source = Model("modelopt", hidden=96, layers=3).write(tmp_path / "source")
    code, seen, _ = dry("marlin-fp4", source)
    assert code == 4
    (finding,) = seen["findings"]
    assert (finding["more"], "a multiple of 64, found 96" in finding["message"]) == (2, True)


def test_another_plan_in_the_output(source, converted, tmp_path):
    half = tmp_path / "half"
    for event in runs.events(source, half, runs.Wanted(tp=2)):
        if isinstance(event, ShardRecord):
            break
    for out in (converted, half):
        before = runs.tree(out)
        code, seen, _ = dry("trtllm", source, "--out", out, "--tp", "1")
        assert (code, len(seen["findings"])) == (5, 1)
        assert "differs in" in seen["findings"][0]["message"]
        assert dry("trtllm", source, "--out", out, "--tp", "1", "--overwrite")[0] == 0
        assert runs.tree(out) == before


def test_too_many_lost_scales(tmp_path):
    def spoil(layer, expert, projection, scales):
        scales[:] = 0x81

    source = Model("modelopt", change_scales=spoil).write(tmp_path / "source")
    code, seen, _ = dry("marlin-fp4", source)
    assert (code, seen["event"]) == (4, "refused")
    assert "of its block scales" in seen["findings"][0]["message"]
    assert dry("marlin-fp4", source, "--max-lost-scales", "100")[0] == 0


def test_no_device_imports_torch(source):
    code = (
        "import sys; from moeconv.cli import main\n"
        f"sys.argv = ['moeconv', 'trtllm', {str(source)!r}, '--dry-run']\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
