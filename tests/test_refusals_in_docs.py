"""Is every message that a person can meet on the page of refusals, under its exit code?

The messages are read from the code: what is given to an error's class, or put in a list of
problems. Values are `…` there, as on the page.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeconv import errors

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/how-to/when-it-refuses.md"
CODES = {
    "BadParameter": 2,
    **{kind.__name__: kind.exit_code for kind in errors.MoeconvError.__subclasses__()},
}
SHORTEST = 5  # letters; what has fewer is another message with something added

INTERNAL = {
    "`…` is short: expected … bytes, found …": "a shard that is committed before all is written",
}
"""What nobody meets, with the reason."""


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield what a message can be, with `…` for values."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in values)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*_texts(body), *_texts(orelse))
        case ast.BinOp(left=left):
            yield from (f"{text}…" for text in _texts(left))
        case ast.List(elts=elements):
            yield from (text for element in elements for text in _texts(element))
        case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element):
            yield from _texts(element)
        case _:
            pass


def _given(function: ast.FunctionDef) -> Iterator[tuple[int, str, ast.expr]]:
    """Yield line by line what each name of a function is given, or has added."""
    for node in ast.walk(function):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AugAssign(target=ast.Name(id="problems" as name), value=value)
                | ast.Call(func=ast.Attribute(value=ast.Name(id="problems" as name)), args=[value])
            ):
                yield node.lineno, name, value
            case _:
                pass


def _first_name(node: ast.expr) -> str:
    """Return the name that a message is, or begins with."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.JoinedStr(values=[ast.FormattedValue(value=ast.Name(id=name)), *_]):
            return name
        case ast.BinOp(left=left):
            return _first_name(left)
        case _:
            return ""


def _messages(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Yield exit codes and messages of the errors that a function makes."""
    given = sorted(_given(function), key=lambda it: it[0])
    for _, name, value in given:
        if name == "problems":
            yield from ((CODES["VerifyError"], text) for text in _texts(value))
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        code = CODES.get(getattr(node.func, "id", getattr(node.func, "attr", "")))
        if code is not None:
            first = _first_name(node.args[0])
            before = [v for line, name, v in given if name == first and line < node.lineno]
            yield from ((code, text) for text in _texts((before or node.args)[-1 if before else 0]))


def _raised() -> list[tuple[int, str]]:
    paths = sorted((ROOT / "moeconv").rglob("*.py"))
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef))
    found = {pair for function in functions for pair in _messages(function)}
    return sorted(pair for pair in found if len(re.findall("[a-z]", pair[1])) >= SHORTEST)


def _rows() -> Iterator[tuple[int, str]]:
    """Yield the exit codes of each section, with the messages that are quoted in it."""
    codes: list[int] = []
    for line in PAGE.read_text().splitlines():
        if heading := re.match(r"## .*?\(([\d, ]+)\)$", line):
            codes = [int(code) for code in heading[1].split(", ")]
        if row := re.match(r"\| “(.+?)” \|", line):
            yield from ((code, row[1]) for code in codes)


def _is_like(text: str, other: str) -> bool:
    """Say whether a text is another one: all of it, or its beginning up to a `:` or the like."""
    parts = ("".join(".*?" if c == "…" else re.escape(c) for c in other), r"(?:$|…|[:;,] | \()")
    return re.match("".join(parts), text) is not None


ROWS = list(_rows())
RAISED = _raised()


@pytest.mark.parametrize(("code", "text"), RAISED)
def test_a_message_is_on_the_page(code: int, text: str):
    quoted = any(
        code == there and (_is_like(text, row) or _is_like(row, text)) for there, row in ROWS
    )
    assert quoted != (text in INTERNAL), f"exit code {code}"


def test_no_row_is_of_a_message_that_is_gone():
    """What is no message of its own is a reason in one: its pieces stand in the code, in order."""
    code = "\n".join(path.read_text() for path in sorted((ROOT / "moeconv").rglob("*.py")))
    code = re.sub(r'"\n\s*f?"', "", code)  # strings that go on in the next line
    for _, row in ROWS:
        pieces = [re.escape(piece.strip()) for piece in row.split("…") if piece.strip()]
        is_reason = re.search(r"[^\n]{0,160}?".join(pieces), code)
        assert is_reason or any(_is_like(row, text) for _, text in RAISED), row


def test_messages_are_found():
    assert len(RAISED) > 150
    assert {code for code, _ in RAISED} == {2, 3, 4, 5, 6}
    assert {text for _, text in RAISED} >= INTERNAL.keys()
