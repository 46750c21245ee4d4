"""Each engine has what the loaders name: run where the engine is installed, without a GPU.

Whole loads need the engines' kernels or a GPU; what they showed is in the explanation of serving.
"""

from __future__ import annotations

import importlib
from importlib import metadata

import pytest

from moeconv.layouts import LAYOUTS
from moeconv.serving.admission import engine_entry
from moeconv.serving.methods import Method
from moeconv.serving.reader import open_converted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # the engines' own
]

GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}


@pytest.fixture(params=GROUPS)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(name, reason="an engine brings us, not we it")
    return name


def methods(engine: str) -> tuple[Method, ...]:
    rows: tuple[Method, ...] = importlib.import_module(f"moeconv.serving.{engine}_methods").METHODS
    return rows


def test_it_is_a_version_that_the_loader_was_tested_with(engine, converted):
    with open_converted(converted) as directory:
        engine_entry(directory, engine, importlib.import_module(engine).__version__)


def test_every_method_is_there(engine):
    for row in methods(engine):
        module, _, name = row.name.partition(":")
        assert isinstance(getattr(importlib.import_module(module), name), type)


def test_every_layout_of_the_engine_has_a_method(engine):
    named = {layout for row in methods(engine) for layout in row.layouts}
    assert named == {x.id for x in LAYOUTS if engine in {known.name for known in x.engines}}


def test_the_entry_point_registers_more_than_once(engine):
    (entry,) = metadata.entry_points(group=GROUPS[engine], name="moeconv")
    register = entry.load()
    register()
    register()
    if engine == "vllm":
        loaders = importlib.import_module("vllm.model_executor.model_loader")
        config = importlib.import_module("vllm.config.load").LoadConfig(load_format="moeconv")
        assert type(loaders.get_model_loader(config)).__module__ == "moeconv.serving.vllm"
