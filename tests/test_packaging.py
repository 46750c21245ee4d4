"""What is built, installed and required: wheel, sdist, entry points, room beside the engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What `uv pip compile --python-version 3.12` chose for moeconv and this engine together.
PINS = json.loads((ROOT / "tests/engine_pins.json").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a wheel and an sdist, built without a network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "moeconv",
        f"moeconv-{PROJECT['version']}.dist-info",
    }
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "moeconv").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == code
    assert "moeconv/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)


def test_wheel_and_sdist_are_small(built):
    for path in built.iterdir():
        assert path.stat().st_size < 1_000_000, path.name


def test_the_sdist_can_build_and_test_itself(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = {"pyproject.toml", "constraints.txt", "LICENSE", "README.md", "tests/conftest.py"}
    assert needed <= names
    assert not any(name.endswith((".safetensors", ".pyc")) for name in names)


def test_an_installed_wheel_runs(wheel, tmp_path):
    """Its own code in a new environment; the libraries it needs are borrowed from this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    (site,) = (tmp_path / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        for name in file.namelist():
            file.extract(name, site)
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def python(*said):
        command = [tmp_path / "bin/python", *said]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert python("-c", "import moeconv; print(moeconv.__file__)").startswith(str(site))
    assert python("-m", "moeconv", "--version").startswith("moeconv ")
    assert json.loads(python("-m", "moeconv", "list", "--json"))["layouts"]


def test_entry_points_lead_to_functions(wheel):
    """The engines' plugins are not imported here (no engine is installed), their files are read."""
    points = {**PROJECT["scripts"]}
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        points |= {f"{group}:{name}": to for name, to in PROJECT["entry-points"][group].items()}
    for target in points.values():
        module, _, name = target.partition(":")
        path = ROOT / Path(*module.split("."))
        file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        assert f"\ndef {name}(" in file.read_text(), target


@pytest.mark.parametrize("engine", sorted(PINS))
def test_requirements_leave_room_for_the_engine(engine):
    wanted = [Requirement(text) for text in PROJECT["dependencies"]]
    for requirement in wanted:
        if requirement.marker is None or requirement.marker.evaluate({"sys_platform": "linux"}):
            pinned = PINS[engine][requirement.name]
            assert requirement.specifier.contains(pinned), f"{requirement} beside {pinned}"


def test_the_extras_are_the_engines_and_the_gpu():
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"dev", "gpu", "sglang", "vllm"}
    for engine in ("vllm", "sglang"):
        (requirement,) = (Requirement(text) for text in extras[engine])
        (version,) = (name.split()[1] for name in PINS if name.startswith(engine))
        assert requirement.name == engine
        assert requirement.specifier.contains(version)
