"""The engines' own loaders stop on a converted directory instead of serving empty experts.

Slow and skipped without the engines; `test_convert.py` holds the facts that they rely on.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests import runs

pytestmark = pytest.mark.slow

LOADERS = {
    "vllm": ("vllm.model_executor.model_loader.default_loader", "vllm.config.load"),
    "sglang": ("sglang.srt.model_loader.loader", "sglang.srt.configs.load_config"),
}


def half(source: Path, out: Path) -> Path:
    steps = runs.events(source, out)
    while not runs.shards(out):
        next(steps)
    return out


@pytest.mark.parametrize("stage", [runs.run, half], ids=["finished", "half"])
@pytest.mark.parametrize("engine", LOADERS)
def test_the_loader_stops(source, tmp_path, engine, stage):
    pytest.importorskip(engine, reason="an engine brings us, not we it")
    loader_module, config_module = map(importlib.import_module, LOADERS[engine])
    if engine == "sglang":
        set_server_args(source)
    out = stage(source, tmp_path / "out")
    loader = loader_module.DefaultModelLoader(config_module.LoadConfig())
    with pytest.raises(RuntimeError, match=r"[Cc]annot find any model weights"):
        prepare(loader, out)
    prepare(loader, source)  # the same call takes the checkpoint it was made from


def set_server_args(source: Path) -> None:
    """SGLang's loader asks the process-wide arguments for a checksum file."""
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    get_context().set_server_args(ServerArgs(model_path=str(source), device="cpu"))


def prepare(loader: object, root: Path) -> object:
    """Call `_prepare_weights`, with as many arguments as this engine's has."""
    method = loader._prepare_weights  # type: ignore[attr-defined]
    names = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    known = {"revision": None, "fall_back_to_pt": True, "allow_patterns_overrides": None}
    return method(*(known.get(name, str(root)) for name in names))
