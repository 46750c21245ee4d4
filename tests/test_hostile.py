"""A checkpoint, a converted directory or a command line that means harm, or was damaged.

Each is refused in a sentence: nothing waits, nothing outside SRC is read and nothing outside OUT
written, whatever names and links say.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moeconv.checkpoint.index import open_checkpoint
from moeconv.cli import app
from moeconv.errors import MoeconvError, OutputError, SourceError, VerifyError
from moeconv.inspection.inspect import inspect_source
from moeconv.kernels.cpu import CpuKernels
from moeconv.output.codec import read_manifest
from moeconv.serving import open_converted
from moeconv.verification.digests import Subset
from moeconv.verification.verify import verify
from tests import runs
from tests.sources import write_raw

INDEX = "model.safetensors.index.json"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
SHARD = "model-00001-of-00002.safetensors"


def refusal(*args: str | Path) -> tuple[int, str]:
    """Return how the command refuses; what would be a traceback fails the test."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if isinstance(result.exception, SystemExit | None):
        return result.exit_code, " ".join(result.output.split())
    assert isinstance(result.exception, MoeconvError), result.exception
    return result.exception.exit_code, str(result.exception)


# What is no regular file.


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def socket(path: Path) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFSOCK | 0o600)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


KINDS = [pipe, device, socket, folder, loop]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", ["config.json", INDEX, SHARD, "tokenizer.json"])
def test_a_source_file_that_is_none(source, make, name):
    if (make, name) == (folder, "tokenizer.json"):
        return  # an empty folder more
    make(source / name)
    with pytest.raises(SourceError):
        open_checkpoint(source)


@pytest.mark.parametrize("make", KINDS)
def test_a_manifest_that_is_no_file(converted, make):
    make(converted / "moeconv.json")
    with pytest.raises(SourceError, match="cannot be read"):
        read_manifest(converted)
    assert inspect_source(str(converted)).findings


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", ["config.json", "experts/*", "weights/*"])
def test_a_converted_file_that_is_none(source, converted, make, name):
    (path, *_) = converted.glob(name)
    make(path)
    with pytest.raises(MoeconvError):
        list(verify(converted, CpuKernels(), read_data=Subset()))
    if name == "config.json":
        assert inspect_source(str(converted)).findings
    if name == "experts/*":
        with pytest.raises(VerifyError, match=r"cannot be read|is not the file that was written"):
            runs.rank_bytes(converted)


@pytest.mark.parametrize("name", ["plan.json", "facts.json", "records/0.json", "tmp/1.safetensors"])
def test_notes_of_a_run_that_are_none(source, converted, tmp_path, name):
    """Whatever has the name of a note or of a shard to come: it is refused, or no note."""
    out = tmp_path / "out"
    for event in runs.events(source, out):
        if hasattr(event, "sha256"):
            break
    (out / ".moeconv" / name).unlink(missing_ok=True)
    os.mkfifo(out / ".moeconv" / name)
    try:
        runs.run(source, out)
    except OutputError:
        assert name == "plan.json"
    else:
        assert runs.tree(out) == runs.tree(converted)


# Names and links that lead away.


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "secret.txt"
    path.parent.mkdir()
    path.write_text("do not publish this")
    return path


def test_a_side_file_that_lies_elsewhere_is_not_published(source, secret):
    (source / "notes.txt").symlink_to(secret)
    with pytest.raises(SourceError, match=r"link to `.*secret\.txt`, outside"):
        open_checkpoint(source)


@pytest.mark.parametrize(
    "name", ["a\nb", "a\x1bb", "a\\..\\x", "C:x", "Experts", "MOECONV.json", "Restore/x"]
)
def test_a_side_file_that_is_none_everywhere_is_refused(source, name):
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_text("text")
    with pytest.raises(SourceError, match="the side file"):
        open_checkpoint(source)


@pytest.mark.parametrize("name", ["..\\x.safetensors", "C:x.safetensors", "a\nb.safetensors"])
def test_an_index_that_leads_elsewhere_on_windows_is_refused(source, name):
    index = source / INDEX
    found = json.loads(index.read_text())
    found["weight_map"]["odd.bias"] = name
    index.write_text(json.dumps(found))
    with pytest.raises(SourceError, match="outside the checkpoint"):
        open_checkpoint(source)


def test_tensors_may_have_any_name(make_checkpoint, tmp_path):
    """It is no file's: they pass through under it, and come back."""
    names = [
        "../x",
        "/etc/passwd",
        "C:\\x",
        "a\nb",
        "a\0b",
        "",
        ".",
        "é" * 700,
        "n" * 5000,
        "\x1b[2J",
    ]
    extra = dict.fromkeys(names, ("U8", (3,), b"abc"))
    source = make_checkpoint("odd", extra=extra, experts=2, layers=1, shards=1)
    out = runs.run(source, tmp_path / "out")
    assert {*names} < {weight.name for weight in read_manifest(out).weights}
    assert refusal("verify", out, "--read-data", "--source", source, "--device", "cpu")[0] == 0
    assert refusal("restore", out, "--out", tmp_path / "back", "--device", "cpu")[0] == 0
    assert runs.tree(tmp_path / "back") == runs.tree(source)
    assert not {path.name for path in tmp_path.iterdir()} - {"odd", "out", "back"}


def test_a_folder_that_lies_elsewhere_is_not_walked(source, secret):
    (source / "more").symlink_to("/")
    with pytest.raises(SourceError, match="link to `/`, outside"):
        open_checkpoint(source)


def test_links_inside_a_checkpoint_are_followed(source):
    (source / "same.json").symlink_to("tokenizer.json")
    assert "same.json" in open_checkpoint(source).side_files


def test_the_cache_of_the_hub_is_read(source, tmp_path, converted):
    """A snapshot there is a folder of links to blobs."""
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for i, path in enumerate(sorted(source.iterdir())):
        path.rename(repository / "blobs" / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    out = runs.run(snapshot, tmp_path / "out")
    assert runs.shards(out) == runs.shards(converted)


def test_a_shard_may_be_a_link(source, tmp_path, converted):
    (source / SHARD).rename(tmp_path / "disk2.safetensors")
    (source / SHARD).symlink_to(tmp_path / "disk2.safetensors")
    assert runs.shards(runs.run(source, tmp_path / "out")) == runs.shards(converted)


@pytest.mark.parametrize("name", ["experts", "weights", ".moeconv/tmp", ".moeconv/records"])
def test_a_folder_of_the_output_that_leads_away_is_refused(source, tmp_path, name):
    out, away = tmp_path / "out", tmp_path / "away"
    away.mkdir()
    (out / name).parent.mkdir(parents=True)
    (out / ".moeconv").mkdir(exist_ok=True)
    (out / name).symlink_to(away)
    with pytest.raises(OutputError, match=r"is a link, so what is written there would lie elsewh"):
        runs.run(source, out)
    assert not list(away.iterdir())


def test_what_a_link_of_the_work_folder_names_is_kept(source, tmp_path, secret):
    out = tmp_path / "out"
    (out / ".moeconv" / "tmp").mkdir(parents=True)
    (out / ".moeconv" / "tmp" / "0.safetensors").symlink_to(secret)
    with pytest.raises(OutputError, match="is a link"):
        runs.run(source, out)
    (out / ".moeconv" / "tmp" / "0.safetensors").unlink()
    os.link(secret, out / ".moeconv" / "tmp" / "0.safetensors")
    runs.run(source, out)
    assert secret.read_text() == "do not publish this"


def test_the_output_directory_itself_may_be_a_link(source, tmp_path, converted):
    (tmp_path / "disk2").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk2")
    assert runs.tree(runs.run(source, tmp_path / "out")) == runs.tree(converted)


ELSEWHERE = [
    *("../x", "/etc/hostname", "a/../../x", "", ".", "a//b", "a\0b", "a\nb"),
    *("..\\x", "C:\\x", "C:x", "\\\\server\\x"),
]


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("where", ["files", "tensors", "weights"])
def test_a_manifest_that_names_files_elsewhere(converted, name, where):
    path = converted / "moeconv.json"
    manifest = json.loads(path.read_text())
    manifest[where][0]["path" if where == "files" else "file"] = name
    path.write_text(json.dumps(manifest))
    for use in (read_manifest, open_converted):
        with pytest.raises(VerifyError, match="outside the directory"):
            use(converted)
    assert refusal("verify", converted)[0] == 6


# Output inside the source.


def inside(source: Path, _: Path) -> Path:
    return source / "out"


def same(source: Path, _: Path) -> Path:
    return source


def roundabout(source: Path, _: Path) -> Path:
    return source / ".." / source.name / "out"


def through_a_link(source: Path, tmp_path: Path) -> Path:
    (tmp_path / "link").symlink_to(source)
    return tmp_path / "link" / "out"


def through_a_link_below(source: Path, tmp_path: Path) -> Path:
    (source / "sub").mkdir()
    (tmp_path / "link").symlink_to(source / "sub")
    return tmp_path / "link" / "out"


@pytest.mark.parametrize("place", [inside, same, roundabout, through_a_link, through_a_link_below])
@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--overwrite",)])
def test_output_inside_the_source_is_refused(source, tmp_path, place, more):
    out = place(source, tmp_path)
    before = runs.tree(source)
    code, words = refusal("trtllm", source, "--out", out, *more)
    assert code == 5
    assert "lies inside the checkpoint" in words
    assert runs.tree(source) == before


@pytest.mark.parametrize("what", ["", "sub"])
def test_output_inside_the_source_through_a_bind_mount(source, tmp_path, what):
    (source / "sub").mkdir()
    bound = tmp_path / "bound"
    bound.mkdir()
    command = ["mount", "--bind", str(source / what), str(bound)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        assert "lies inside" in refusal("trtllm", source, "--out", bound / "out")[1]
    finally:
        subprocess.run(["umount", str(bound)], check=True)


# What a dry run and a run refuse is the same.


def below_a_file(out: Path) -> Path:
    out.write_text("a file")
    return out / "x"


def foreign(out: Path) -> Path:
    (out / ".moeconv").mkdir(parents=True)
    (out / "thesis.tex").write_text("years of work")
    return out


def long_name(out: Path) -> Path:
    return out / ("n" * 300)


def long_path(out: Path) -> Path:
    return out.joinpath(*["n" * 200] * 30)


def broken_plan(out: Path) -> Path:
    (out / ".moeconv").mkdir(parents=True)
    (out / ".moeconv" / "plan.json").write_text("{")
    return out


@pytest.mark.parametrize("place", [below_a_file, foreign, long_name, long_path, broken_plan])
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_a_dry_run_refuses_what_a_run_refuses(source, tmp_path, place, overwrite):
    out = place(tmp_path / "out")
    args = ("trtllm", source, "--out", out, *overwrite)
    (dry, shown), (code, words) = refusal(*args, "--dry-run"), refusal(*args)
    assert dry == code
    if (place, overwrite) in {(foreign, ()), (broken_plan, ("--overwrite",))}:
        assert code == 0, "begun by moeconv: it may go on, or is overwritten"
        return
    assert code == 5
    assert words[:60] in shown


@pytest.mark.parametrize("verb", ["trtllm", "inspect", "verify", "rank"])
@pytest.mark.parametrize("place", [long_name, long_path])
def test_a_source_with_too_long_a_name(tmp_path, verb, place):
    code, words = refusal(verb, place(tmp_path))
    assert code == 3
    assert "too long" in words


# Headers, index and config.


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([(0, 4), (2, 6)], "overlaps"),
        ([(0, 4), (6, 10)], "follows a hole"),
        ([(1, 5), (5, 9)], "follows a hole"),
        ([(-4, 0), (0, 4)], r"its bytes are \[-4, 0\)"),
        ([(4, 0), (0, 4)], r"its bytes are \[4, 0\)"),
        ([(0, 4), (4, 9)], r"its bytes are \[4, 9\)"),
        ([(0, 4), (0, 4)], "overlaps"),
        ([(0, 4), (1 << 70, (1 << 70) + 4)], "shorter than its header"),
    ],
)
def test_ranges_that_no_writer_makes(source, ranges, words):
    header = {
        f"t{i}": {"dtype": "U8", "shape": [4], "data_offsets": list(pair)}
        for i, pair in enumerate(ranges)
    }
    (source / INDEX).unlink()
    write_raw(source / "z.safetensors", json.dumps(header).encode(), bytes(10))
    with pytest.raises(SourceError, match=words):
        open_checkpoint(source)


def test_a_name_given_a_hundred_thousand_times_is_found_at_once(source):
    entry = '"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
    write_raw(source / SHARD, ("{" + entry * 100_000 + entry[:-1] + "}").encode())
    with pytest.raises(SourceError, match="'a' twice"):
        open_checkpoint(source)


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_a_pointer_of_git_lfs_is_said(source, name):
    (source / name).write_bytes(LFS)
    with pytest.raises(SourceError) as error:
        open_checkpoint(source)
    assert "Git LFS pointer" in str(error.value)
    assert "git lfs pull" in str(error.value.hint)


def test_a_side_file_that_is_a_pointer_is_warned_of(source):
    (source / "tokenizer.json").write_bytes(LFS)
    assert any("Git LFS" in text for text in open_checkpoint(source).warnings)


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: text[:-1] + ', "twice": 1, "twice": 2}', "gives 'twice' twice"),
        (lambda text: text[:-1] + ', "half": "\\ud800"}', "surrogates not allowed"),
        (lambda text: text[:-1] + ', "many": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        (lambda text: text[:-1] + ', "deep": ' + '{"a":' * 100_000, "cannot be read as JSON"),
        (lambda text: text.encode("utf-16"), "cannot be read as JSON|no JSON object|is not in"),
        (lambda text: text[:-1].encode() + b', "raw": "\xff"}', "cannot be read as JSON"),
    ],
    ids=["twice", "surrogate", "digits", "deep", "utf-16", "raw"],
)
def test_json_that_says_two_things_or_nothing(source, name, edit, words):
    changed: str | bytes = edit((source / name).read_text())
    (source / name).write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    if isinstance(changed, bytes) and changed.startswith(b"\xff\xfe"):
        open_checkpoint(source)  # Python reads it, and nothing in it is another way in
        return
    with pytest.raises(SourceError, match=words):
        open_checkpoint(source)


def test_a_key_given_twice_with_one_value_is_let_through(source):
    text = (source / "config.json").read_text()
    (source / "config.json").write_text(text[:-1] + ', "hidden_size": 128}')
    assert open_checkpoint(source).config["hidden_size"] == 128


def test_a_huge_file_of_json_is_not_read(source):
    os.truncate(source / "config.json", 1 << 40)
    with pytest.raises(SourceError, match="larger than"):
        open_checkpoint(source)


def test_the_codes_of_a_terminal_are_not_printed(make_checkpoint):
    source = make_checkpoint(extra={"model.\x1b[2Jnorm[red]:bug:": ("U8", (1,), b"x")})
    (source / INDEX).unlink()
    names = {"model.ghost\x1b[2J": SHARD}
    (source / INDEX).write_text(json.dumps({"weight_map": names}))
    done = runs.moeconv("inspect", source)
    assert "model.ghost�[2J" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


# The streams.


@pytest.mark.parametrize(
    "args", [["list"], ["list", "--json"], ["--help"], ["--version"], ["trtllm", "--help"]]
)
def test_a_full_disk_behind_stdout(args):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*runs.COMMAND, *args], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 5
    assert done.stderr == "error: stdout cannot be written: No space left on device\n"


def test_a_full_disk_behind_stdout_leaves_a_run_that_goes_on(source, converted, tmp_path):
    args = [*runs.COMMAND, "trtllm", str(source), "--out", str(tmp_path / "out"), "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(args, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 5
    assert "Traceback" not in done.stderr
    again = runs.moeconv("trtllm", source, "--out", tmp_path / "out")
    assert again.returncode == 0, again.stderr
    assert runs.shards(tmp_path / "out").keys() == runs.shards(converted).keys()


def test_a_full_disk_behind_stderr_ends_no_run(source, tmp_path):
    args = [*runs.COMMAND, "trtllm", str(source), "--out", str(tmp_path / "out")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(args, stderr=full, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (0, b"")


@pytest.mark.parametrize("args", [["list"], ["list", "--json"], ["--help"]])
def test_a_reader_that_has_enough(args):
    """As `moeconv list | head -1`: it ends quietly."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*runs.COMMAND, *args], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


# Sizes without sense.


@pytest.mark.parametrize(
    "more",
    [
        ["--hidden", "99999999999999999999"],
        ["--intermediate", "6400000000"],
        ["--experts", "1000000000"],
        ["--tp", "1000000"],
    ],
    ids=" ".join,
)
def test_explain_refuses_sizes_without_sense(more):
    assert CliRunner().invoke(app, ["explain", "trtllm-bf16", *more]).exit_code == 2


def test_a_rank_of_both_says_what_it_holds(converted):
    shown = CliRunner().invoke(app, ["rank", str(converted), "--tp", "2", "--ep", "2"]).output
    assert "one of 2 parts of each of 1/2 of the experts" in shown
