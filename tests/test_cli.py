"""The command: help, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moeconv.cli import app
from moeconv.errors import MoeconvError
from tests import runs
from tests.sources import Tiny, write_tiny

VERBS = ("trtllm", "marlin-fp4", "convert", "verify", "rank")
runner = CliRunner()


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example_and_the_exit_codes(verb):
    shown = " ".join(runner.invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).output.split())
    assert f"Example: moeconv {verb} " in shown
    assert "Exit codes: 0 done, 2 usage, 3 source" in shown


@pytest.mark.parametrize("verb", ["inspect", "list", "explain"])
def test_help_of_verbs_that_only_look(verb):
    shown = " ".join(runner.invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).output.split())
    assert f"Example: moeconv {verb} " in shown
    assert "Exit codes: 0 " in shown


def test_help_names_every_verb():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(verb in result.output for verb in VERBS)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("ver", {"verify"}),
        ("trtllm ./x --max-d", {"--max-device-memory", "--max-disk"}),
        ("trtllm ./x --family qwen-", {"qwen-moe"}),
        ("convert ./x --layout trt", {"trtllm-bf16"}),
        ("explain marlin-n", {"marlin-nvfp4", "marlin-nvfp4-sglang"}),
        ("bench --shape gpt", {"gpt-oss-120b"}),
        ("bench --layout trt", {"trtllm-bf16"}),
        ("marlin-fp4 ./x --engine ", {"vllm", "sglang"}),
    ],
)
def test_the_shell_completes_names(typed, completed, monkeypatch):
    words = f"moeconv {typed}"
    monkeypatch.setenv("_MOECONV_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    done = runs.moeconv()
    assert (set(done.stdout.split()), done.stderr) == (completed, "")


def test_version():
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, "moeconv 0.1.0\n")


@pytest.mark.parametrize("args", [["--help"], ["trtllm", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(args):
    code = (
        "import sys; from moeconv.cli import main\n"
        f"sys.argv = ['moeconv', *{args}]\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'flashinfer', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_convert_verify_rank(source, tmp_path):
    out = tmp_path / "out"
    done = runs.moeconv("trtllm", source, "--out", out)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "converted to" in done.stderr
    assert "peak memory" in done.stderr

    checked = runner.invoke(app, ["verify", str(out), "--read-data", "--source", str(source)])
    assert (checked.exit_code, checked.stdout) == (0, ""), checked.stderr
    assert "as its manifest says" in checked.stderr
    assert "byte for byte" in checked.stderr

    done = runs.moeconv("rank", out, "--tp", "2", "--tp-rank", "1")
    assert done.returncode == 0, done.stderr
    assert "w13_weight" in done.stdout

    done = runs.moeconv("trtllm", source, "--out", out)
    assert (done.returncode, done.stdout) == (0, "")
    assert "nothing to do" in done.stderr


def test_the_default_output_is_named_after_the_source(source, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    assert runs.moeconv("trtllm", source, cwd=work).returncode == 0
    assert [path.name for path in work.iterdir()] == ["source-trtllm-bf16"]
    done = runs.moeconv("trtllm", ".", cwd=source)
    assert done.returncode == 5
    assert "inside the checkpoint" in done.stderr
    assert runs.moeconv("trtllm", ".", "--out", "../beside", cwd=source).returncode == 0


def test_json_lines(source, tmp_path):
    out = tmp_path / "out"
    done = runs.moeconv("trtllm", source, "--out", out, "--json")
    *shards, last = runs.json_lines(done.stdout)
    assert sorted(line["file"] for line in shards) == sorted(runs.shards(out))
    assert {line["event"] for line in shards} == {"shard"}
    assert last["event"] == "done"
    assert last["bytes_written"] > 0
    assert last["peak_rss_bytes"] > 0

    (line,) = runs.json_lines(runs.moeconv("verify", out, "--json").stdout)
    assert line["event"] == "verified"

    lines = runs.json_lines(runs.moeconv("rank", out, "--tp", "2", "--json").stdout)
    assert [(line["param"], line["shape"]) for line in lines[:2]] == [
        ("w13_weight", [4, 2, 256, 64]),
        ("w2_weight", [4, 2, 128, 64]),
    ]


def test_a_second_run_says_done_in_json_too(source, converted):
    done = runs.moeconv("trtllm", source, "--out", converted, "--json", "--max-shard-size", "1GB")
    assert done.returncode == 0, done.stderr
    assert [line["event"] for line in runs.json_lines(done.stdout)] == ["done"]


@pytest.mark.parametrize(("text", "layers"), [("0-1", [0, 1]), ("0-99", [0, 1]), ("1", [1])])
def test_layers(source, tmp_path, text, layers):
    out = tmp_path / "out"
    done = runs.moeconv("trtllm", source, "--out", out, "--layers", text)
    assert done.returncode == 0, done.stderr
    assert sorted({layer for layer, _ in runs.rank_bytes(out, partial=True)}) == layers
    is_all = layers == [0, 1]
    assert ("vllm serve" in done.stderr, "is all of the model" in done.stderr) == (is_all, is_all)
    assert ("the same command without --layers" in done.stderr) != is_all
    assert ("vllm serve" in runs.invoke("inspect", out)) == is_all


def test_layers_that_are_not_there(source, tmp_path):
    done = runs.moeconv("trtllm", source, "--out", tmp_path / "out", "--layers", "1-99")
    assert "`--layers 1-99` ends behind 1, the last layer with experts" in done.stderr
    assert json.loads((tmp_path / "out/moeconv.json").read_text())["partial"] == "layers 1-1"


def test_a_dry_run_of_what_is_done_says_so(source, tmp_path):
    command = ("trtllm", source, "--out", tmp_path / "out")
    assert runs.moeconv(*command).returncode == 0
    again = runs.moeconv(*command, "--dry-run")
    assert "is already converted with these options; nothing would be written" in again.stderr
    assert json.loads(runs.moeconv(*command, "--dry-run", "--json").stdout)["is_done"]


@pytest.mark.parametrize("as_json", [False, True])
def test_dry_run_writes_nothing(source, tmp_path, as_json):
    before = runs.tree(tmp_path)
    args = ["--json"] if as_json else []
    done = runs.moeconv("trtllm", source, "--dry-run", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert runs.tree(tmp_path) == before
    if as_json:
        (line,) = runs.json_lines(done.stdout)
        assert (line["event"], line["tp_sizes"], line["experts"]) == ("plan", [1, 2], 4)
    else:
        assert "plan for source" in done.stdout
        assert "TP 1, 2" in done.stdout


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """Return what a refused command line names; it changes none of it."""
    root = tmp_path_factory.mktemp("places")
    source, foreign = write_tiny(root / "source", Tiny()), root / "foreign"
    foreign.mkdir()
    (foreign / "x").touch()
    return {
        "SOURCE": source,
        "FILE": source / "config.json",
        "OUT": runs.run(source, root / "out"),
        "FOREIGN": foreign,
        "OTHER": write_tiny(root / "other", Tiny(seed=1)),
    }


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["trtllm"], 2, "SRC"),
        (["trtllm", "SOURCE", "--tp", "0"], 2, "--tp"),
        (["trtllm", "SOURCE", "--max-host-memory", "\uff11GB"], 2, "is no size"),
        (["trtllm", "SOURCE", "--max-disk", "9" * 40], 2, "'--max-disk': '999"),
        (["trtllm", "SOURCE", "--layers", "\u0661-3"], 2, "no range of layers"),
        (["trtllm", "SOURCE", "--shard-of", "1/99999999"], 2, "more than 999999 shares"),
        (["trtllm", "SOURCE", "--workers", "9" * 23], 2, "--workers"),
        (["trtllm", "SOURCE", "--tp", "\u0661"], 2, "write it with 0 to 9"),
        (["trtllm", "SOURCE", "--tp=\uff11"], 2, "write it with 0 to 9"),
        (["trtllm", "SOURCE", "--private"], 2, "it needs --push"),
        (["trtllm", "SOURCE", "--revision", "x"], 2, "ORG/NAME@REVISION"),
        (["trtllm", "SOURCE", "--create-pr"], 2, "it needs --push"),
        (["trtllm", "SOURCE", "--keep-source"], 2, "is here"),
        (["trtllm", "SOURCE", "--device", "cuda:-1"], 4, "N from 0 to 127"),
        (["trtllm", "SOURCE", "--device", "cuda:999999999999"], 4, "N from 0 to 127"),
        (["trtllm", "SOURCE", "--device", "0"], 4, "N from 0 to 127"),
        (["trtllm", ""], 2, "the argument after `trtllm` is empty"),
        (["trtllm", "SOURCE", "--out", ""], 2, "the argument after `--out` is empty"),
        (["verify", "SOURCE", "--source="], 2, "the argument after `--source` is empty"),
        (["verify", "FILE"], 3, "is not a directory"),
        (["rank", "FILE"], 3, "is not a directory"),
        (["restore", "FILE", "--out", "OUT"], 3, "is not a directory"),
        (["seal", "FILE"], 5, "is not a directory"),
        (["trtllm", "SOURCE", "--max-host-memory", "much"], 2, "is no size"),
        (["trtllm", "SOURCE", "--max-shard-size", "0"], 2, "--max-shard-size"),
        (["trtllm", "SOURCE", "--layers", "3-1"], 2, "no range of layers"),
        (["trtllm", "SOURCE", "--workers", "0"], 2, "--workers"),
        (["trtllm", "./nowhere"], 3, "`nowhere` is not a directory"),
        (["verify", "SOURCE"], 3, "`moeconv.json` is not in"),
        (["rank", "SOURCE"], 3, "`moeconv.json` is not in"),
        (["trtllm", "OUT"], 4, "already converted"),
        (["trtllm", "SOURCE", "--tp", "3"], 4, "does not divide by"),
        (["trtllm", "SOURCE", "--max-host-memory", "1kB"], 4, "does not hold one expert"),
        (["trtllm", "SOURCE", "--device", "tpu"], 4, "`--device tpu` is none of"),
        (["trtllm", "SOURCE", "--device", "cuda:99"], 4, "`cuda:99`"),
        (["trtllm", "SOURCE", "--family", "x"], 4, "`--family x` is no family"),
        (["rank", "OUT", "--tp", "3"], 4, "cannot serve TP 3"),
        (["trtllm", "SOURCE", "--out", "OUT", "--tp", "2"], 5, "differs in"),
        (["trtllm", "SOURCE", "--out", "FOREIGN"], 5, "not empty and not a moeconv directory"),
        (["trtllm", "SOURCE", "--out", "FOREIGN", "--overwrite"], 5, "not a moeconv directory"),
        (["verify", "OUT", "--source", "OTHER"], 6, "hint:"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_exit_codes(places, tmp_path, args, code, words):
    done = runs.moeconv(*(places.get(arg, arg) for arg in args), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b[" not in done.stderr, "colours where there is no terminal"


def test_every_error_has_a_code_of_its_own():
    kinds = MoeconvError.__subclasses__()
    assert {kind.exit_code for kind in kinds} == {3, 4, 5, 6}
    assert all(kind.__doc__ for kind in kinds)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("5GB", 5 * 10**9), ("1GiB", 1 << 30), ("1.5 mb", 1_500_000), ("2k", 2000)],
)
def test_sizes(source, text, nbytes):
    from moeconv.cli.options import parse_size

    assert parse_size(text) == nbytes


def test_a_layout_by_name_is_what_its_own_command_makes(source, tmp_path):
    runs.invoke("trtllm", source, "--out", tmp_path / "a")
    runs.invoke("convert", source, "--layout", "trtllm-bf16", "--out", tmp_path / "b")
    assert runs.tree(tmp_path / "a") == runs.tree(tmp_path / "b")


def test_a_layout_that_is_not_known(source):
    done = runs.moeconv("convert", source, "--layout", "cutlass")
    assert done.returncode == 4
    assert "`cutlass` is no layout that moeconv knows" in done.stderr
    assert "known layouts: trtllm-bf16, " in done.stderr


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("moeconv list --json >&-", 5, "stdout is closed"),
        ("moeconv list 2>&-", 0, "qwen-moe"),
        ("COLUMNS=0 moeconv list --hello", 2, "No such option"),
        ("RANK=0 WORLD_SIZE=2 moeconv trtllm . --shard-of 1/2", 2, "unset them, or leave"),
    ],
)
def test_odd_shells(shell, code, said):
    command = shell.replace("moeconv", f"{sys.executable} -m moeconv")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert said in done.stdout + done.stderr


def test_ctrl_c_during_imports_is_no_traceback():
    code = (
        "import signal, sys; from moeconv.__main__ import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background
        "class Pressed:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Pressed()); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_name_that_is_no_directory_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = runs.moeconv("inspect", "converetd", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout.startswith("error: `converetd` is not a directory here")
    assert "hint: is the directory spelt so?" in done.stdout
