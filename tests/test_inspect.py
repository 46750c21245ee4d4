"""`inspect`: what is said of a checkpoint, of a converted directory, and of what is wrong with one.

Numbers in names are those of the cases that the project is held to.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moeconv.cli import app
from moeconv.errors import MoeconvError
from moeconv.inspection.inspect import inspect_source
from tests import runs
from tests.fp4.models import Model
from tests.sources import Tiny, noise, write_checkpoint, write_safetensors, write_tiny

SCHEMA = Path(__file__).parent.parent / "docs/reference/inspect.schema.json"
SAID = {"norm_topk_prob": True}


def mixtral(root: Path) -> Path:
    names = {"mlp.experts": "block_sparse_moe.experts", "gate_proj": "w1", "up_proj": "w3"}
    names |= {"down_proj": "w2"}
    tensors = {}
    for name, tensor in Tiny().tensors().items():
        new = name
        for old in names:
            new = new.replace(old, names[old])
        tensors[new] = tensor
    config = Tiny().model_config() | {"model_type": "mixtral", "num_local_experts": 4}
    return write_checkpoint(root, tensors, config | {"intermediate_size": 128})


CHECKPOINTS = {
    "A": lambda root: write_tiny(root, Tiny(config=SAID)),
    "B": lambda root: write_tiny(
        root, Tiny(storage="stacked", config={"model_type": "qwen3_5_moe"})
    ),
    "C": lambda root: Model("modelopt").write(root),
    "D": lambda root: Model("ct").write(root),
    "E": lambda root: Model("gptoss").write(root),
    "F": lambda root: Model("deepseek").write(root),
    "G": lambda root: write_tiny(root, Tiny(storage="plain")),
    "G4": lambda root: Model("nemotron").write(root),
    "H": mixtral,
}


def look(root, *options):
    """Return exit code and JSON."""
    result = CliRunner().invoke(app, ["inspect", str(root), "--json", *options])
    return result.exit_code, json.loads(result.stdout)


def answers(seen):
    return {row["layout"]: row["answer"] for row in seen["checkpoint"]["layouts"]}


def outcome(*args):
    """Return the exit code of a command, and what it refused with."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if isinstance(result.exception, MoeconvError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.stderr


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write(root / name) for name, write in CHECKPOINTS.items()}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_json_is_as_its_schema_says(checkpoints, name, tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    code, seen = look(checkpoints[name])
    assert code == 0
    jsonschema.validate(seen, json.loads(SCHEMA.read_text()))


def test_a_checkpoint(checkpoints):
    code, seen = look(checkpoints["A"])
    said = seen["checkpoint"]
    assert (code, seen["findings"], seen["converted"]) == (0, [], None)
    assert (said["model_types"], said["family"]) == (["qwen3_moe"], "qwen-moe")
    assert (said["activation"], said["scoring"], said["renormalises"]) == ("silu", "softmax", True)
    (group,) = seen["groups"]
    assert group == {
        "layers": "0-1",
        "count": 2,
        "scheme": "bf16",
        "experts": 4,
        "hidden": 128,
        "intermediate": 128,
        "gated": True,
        "order": "halves",
        "nbytes": 2 * 4 * 3 * 128 * 128 * 2,
    }
    total = said["expert_bytes"] + said["other_bytes"]
    assert said["expert_bytes"] == group["nbytes"]
    assert total == sum(len(data) for _, _, data in Tiny().tensors().values())
    assert answers(seen) == {"trtllm-bf16": "yes"} | dict.fromkeys(
        [
            "marlin-nvfp4",
            "marlin-nvfp4-sglang",
            "marlin-mxfp4-ct",
            "marlin-mxfp4",
            "marlin-mxfp4-gptoss",
            "marlin-mxfp4-gptoss-sglang",
        ],
        "no",
    )
    trtllm = said["layouts"][0]
    assert (trtllm["tp_sizes"], trtllm["own_tp_sizes"]) == ([1, 2], [4, 8, 16, 32])
    assert trtllm["command"] == f"moeconv trtllm {checkpoints['A']}"


def test_8_order_is_the_familys_not_the_shapes(checkpoints):
    _, pairs = look(checkpoints["E"])
    _, halves = look(checkpoints["D"])
    assert [group["order"] for group in (*pairs["groups"], *halves["groups"])] == [
        "pairs",
        "halves",
    ]
    assert answers(pairs)["marlin-mxfp4-gptoss"] == "yes"


def test_12_a_suffix_that_no_family_maps(tmp_path):
    tiny = Tiny(storage="stacked", config={"model_type": "qwen3_5_moe"})
    tensors = {
        f"{name}_packed" if "proj" in name else name: it for name, it in tiny.tensors().items()
    }
    code, seen = look(write_checkpoint(tmp_path / "source", tensors, tiny.model_config()))
    assert (code, seen["groups"]) == (4, [])
    (finding,) = seen["findings"]
    assert finding["more"] == 1
    assert "`gate_up_proj_packed` BF16" in finding["message"]


@pytest.mark.parametrize("prefix", ["model.layers.2.mlp.experts", "mtp.0.mlp.experts"])
def test_13_experts_beyond_the_main_model_are_counted(tmp_path, prefix):
    names = [f"{prefix}.{e}.{p}_proj.weight" for e in range(2) for p in ("gate", "up", "down")]
    extra = {name: ("BF16", (128, 128), noise(name, 2 * 128 * 128)) for name in names}
    _, seen = look(write_tiny(tmp_path / "source", Tiny(extra=extra, config=SAID)))
    assert [group["layers"] for group in seen["groups"]] == ["0-1"]
    assert seen["checkpoint"]["other_experts"] == 6
    assert answers(seen)["trtllm-bf16"] == "yes"


def test_14_shared_experts_are_none_and_ten_comes_after_nine(tmp_path):
    shared = {
        f"model.layers.0.mlp.{name}.up_proj.weight": ("BF16", (128, 128), bytes(2 * 128 * 128))
        for name in ("shared_expert", "shared_experts")
    }
    tiny = Tiny(experts=11, layers=11, hidden=64, intermediate=64, extra=shared)
    _, seen = look(write_tiny(tmp_path / "source", tiny))
    (group,) = seen["groups"]
    assert (group["experts"], group["layers"]) == (11, "0-10")
    assert group["nbytes"] == 11 * 11 * 3 * 64 * 64 * 2
    assert seen["checkpoint"]["other_experts"] == 0


@pytest.mark.parametrize("verb", ["trtllm", "marlin-fp4"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_15_inspect_and_the_command_agree(checkpoints, name, verb):
    _, seen = look(checkpoints[name])
    made = [
        row["command"].split()[1:]
        for row in seen["checkpoint"]["layouts"]
        if row["command"] and row["command"].split()[1] == verb
    ]
    for command in made:
        assert outcome(*command, "--dry-run")[0] == 0
    if not made:
        code, words = outcome(verb, checkpoints[name], "--dry-run")
        assert code == 4
        assert "stored as" in words


def test_16_an_unknown_model_with_known_names(tmp_path):
    source = write_tiny(tmp_path / "source", Tiny(config={"model_type": "newest_moe"}))
    code, seen = look(source)
    said = seen["checkpoint"]
    assert (code, said["family"]) == (4, None)
    assert "qwen-moe" in said["alike"]
    assert (said["activation"], said["routing"]) == (None, None)
    (finding,) = seen["findings"]
    assert "says model_type newest_moe, which no family of moeconv names" in finding["message"]
    assert "say `--family` with one of these" in finding["hint"]
    trtllm = said["layouts"][0]
    assert (trtllm["answer"], trtllm["engines"][0]["reasons"]) == (
        "yes, but",
        ["the activation and the routing of this model are not known"],
    )
    assert trtllm["command"].endswith("--family NAME")
    code, seen = look(source, "--family", "qwen-moe")
    assert (code, seen["findings"]) == (0, [])
    assert seen["checkpoint"]["layouts"][0]["command"].endswith("source --family qwen-moe")


def test_18_marlin_is_a_fallback_on_blackwell(checkpoints):
    for name in ("C", "D", "E", "F"):
        shown = runs.invoke("inspect", checkpoints[name])
        assert "on Blackwell it is a fallback: there are native FP4 kernels there" in shown


@pytest.mark.parametrize("equal", [True, False])
def test_20_a_name_in_two_shards(source, equal):
    (first, *_) = sorted(source.glob("*.safetensors"))
    name = "model.embed_tokens.weight"
    data = noise(name, 16 * 128 * 2, 0 if equal else 1)
    (source / "model.safetensors.index.json").unlink()
    write_safetensors(source / "more.safetensors", {name: ("BF16", (16, 128), data)})
    code, seen = look(source)
    words = (seen["warnings"] or [seen["findings"][0]["message"]])[0]
    assert (code, f"`{name}` is in `{first.name}`" in words) == (0 if equal else 3, True)
    assert words.endswith("with equal bytes; the first is used" if equal else "different bytes")


def test_every_problem_is_found_at_once(tmp_path):
    tiny = Tiny(layers=6)
    tensors = tiny.tensors()
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    tensors["model.layers.3.mlp.experts.0.up_proj.zeros"] = ("U8", (3,), b"abc")
    for name in [name for name in tensors if name.startswith("model.layers.5.mlp.experts")]:
        del tensors[name]
    source = write_checkpoint(tmp_path / "source", tensors, tiny.model_config())
    code, seen = look(source)
    found = [(finding["code"], finding["more"]) for finding in seen["findings"]]
    assert (code, found) == (3, [(3, 1), (4, 0), (3, 0)])
    assert [group["layers"] for group in seen["groups"]] == ["0, 4"]
    assert seen["checkpoint"]["other_experts"] == 0
    assert {row["command"] for row in seen["checkpoint"]["layouts"]} == {None}

    code, words = outcome("trtllm", source, "--dry-run")
    assert code == 3
    assert words.count("error: ") == 3
    assert "up_proj.weight` is missing: expected 4 experts" in words
    assert "(and 1 more like it)" in words
    assert "layer 5 has no experts, but `config.json` promises them" in words


@pytest.mark.parametrize("name", ["A", "C", "E", "G4"])
def test_a_converted_directory(checkpoints, name, tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    source, out = checkpoints[name], tmp_path / "out"
    verb = "trtllm" if name == "A" else "marlin-fp4"
    assert outcome(verb, source, "--out", out)[0] == 0
    code, seen = look(out)
    jsonschema.validate(seen, json.loads(SCHEMA.read_text()))
    said = seen["converted"]
    assert (code, seen["checkpoint"], said["partial"], said["tp"]) == (0, None, None, None)
    assert said["ep_sizes"] == [1, 2, 4]
    assert said["tp_sizes"][:2] == [1, 2]
    assert said["source"] == name
    flags = {"trtllm": "flashinfer_trtllm", "marlin-fp4": "marlin"}[verb]
    assert said["engines"][0]["start"] == (
        f"vllm serve {out} --load-format moeconv --moe-backend {flags}"
    )
    assert bool(said["scales"]) == (name in {"C", "G4"})
    _, before = look(source)
    for group, was in zip(seen["groups"], before["groups"], strict=True):
        assert {**group, "nbytes": 0} == {**was, "nbytes": 0}
    shown = runs.invoke("inspect", out)
    assert "serves" in shown
    assert "check it" in shown


def test_a_partial_directory_and_a_half_finished_one(source, tmp_path):
    out = runs.run(source, tmp_path / "out", runs.Wanted(layers=(0, 0)))
    code, seen = look(out)
    assert (code, seen["converted"]["partial"]) == (0, "layers 0-0")
    assert seen["warnings"] == ["it holds only layers 0-0 of the model, for a trial"]
    half = tmp_path / "half"
    (half / ".moeconv").mkdir(parents=True)
    code, seen = look(half)
    assert (code, seen["checkpoint"], seen["converted"]) == (4, None, None)
    assert "is a half-finished conversion" in seen["findings"][0]["message"]


def test_a_file_for_one_tp_size(source, tmp_path):
    out = runs.run(source, tmp_path / "out", runs.Wanted(tp=2))
    _, seen = look(out)
    assert (seen["converted"]["tp"], seen["converted"]["tp_sizes"]) == (2, [2])
    assert "TP 2 only" in runs.invoke("inspect", out)


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (lambda root: (root / "config.json").unlink(), 3, "`config.json` is not in"),
        (lambda root: (root / "config.json").write_text("{"), 3, "cannot be read as JSON"),
        (lambda root: (root / "moeconv.json").write_text("{}"), 6, "`moeconv.json` cannot be read"),
        (lambda root: root.rename(root.with_name("gone")), 3, "is not a directory"),
    ],
)
def test_what_cannot_be_read(source, spoil, code, words):
    spoil(source)
    found, seen = look(source)
    assert (found, len(seen["findings"])) == (code, 1)
    assert words in seen["findings"][0]["message"]
    done = CliRunner().invoke(app, ["inspect", str(source)])
    assert words in " ".join(done.stdout.split())


def test_a_converted_directory_without_its_config(converted):
    (converted / "config.json").unlink()
    code, seen = look(converted)
    assert (code, seen["findings"][0]["code"]) == (3, 3)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_it_fits_the_terminal(checkpoints, name, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = runs.invoke("inspect", checkpoints[name])
    assert "\x1b[" not in shown
    long = [line for line in shown.splitlines() if len(line) > columns]
    assert all(line.split()[:2] == ["run", "moeconv"] for line in long)  # whole, to be copied


@pytest.mark.parametrize("verb", [["inspect", "SOURCE"], ["list"], ["explain", "marlin-nvfp4"]])
def test_nothing_heavy_is_imported(source, verb):
    args = [str(source) if arg == "SOURCE" else arg for arg in verb]
    code = (
        "import sys; from moeconv.cli import main\n"
        f"sys.argv = ['moeconv', *{args}]\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'flashinfer', 'numba', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.bench
def test_20_000_tensors_in_200_shards(tmp_path):
    """Sparse files of a real model's sizes: the time is that of a process from start to end."""
    source = tmp_path / "source"
    source.mkdir()
    names = [
        (f"model.layers.{layer}.mlp.experts.{e}.{name}.weight", shape)
        for layer in range(52)
        for e in range(128)
        for name, shape in (
            ("gate_proj", (768, 2048)),
            ("up_proj", (768, 2048)),
            ("down_proj", (2048, 768)),
        )
    ]
    each, weight_map = len(names) // 200 + 1, {}
    for i in range(200):
        file = f"model-{i + 1:05}-of-00200.safetensors"
        write_sparse(source / file, names[i * each : (i + 1) * each])
        weight_map.update({name: file for name, _ in names[i * each : (i + 1) * each]})
    config = Tiny(experts=128, hidden=2048, intermediate=768, layers=52).model_config()
    (source / "config.json").write_text(json.dumps(config))
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    times = []
    for _ in range(3):
        started = time.perf_counter()
        done = runs.moeconv("inspect", source, "--json")
        times.append(time.perf_counter() - started)
        assert done.returncode == 0, done.stderr
    started = time.perf_counter()
    seen = inspect_source(str(source))
    inside = time.perf_counter() - started
    assert seen.checkpoint is not None
    print(
        f"{seen.checkpoint.tensors} tensors in {seen.checkpoint.files} shards: "
        f"{min(times):.2f} s a process, {inside:.2f} s of it to look"
    )


def write_sparse(path, tensors):
    table, at = {}, 0
    for name, shape in tensors:
        size = 2 * shape[0] * shape[1]
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)
