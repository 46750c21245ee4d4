"""What will an engine not take, and what does it ask for?

A layout's bytes may be right and still find no kernel: engines choose one by activation, routing,
number of experts and GPU. Read in vLLM 0.33.0 (`trtllm_bf16_moe.py`, `marlin_moe.py`,
`activation.py`, `registry.py`) and SGLang 0.5.23
(`moe_runner/flashinfer_trtllm.py`, `moe_runner/marlin.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from moeconv.errors import UnsupportedError
from moeconv.planning.traits import UNTOLD, VLLM_TRANSFORMERS, Kind, Model
from moeconv.shell import typed

if TYPE_CHECKING:
    from moeconv.layouts.layout import Engine, Layout

Word: TypeAlias = Literal["yes", "yes, but", "no"]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that an engine does not take (`no`), takes one way only (`but`), or needs."""

    engines: tuple[str, ...]
    layouts: tuple[str, ...]
    weight: Literal["no", "but", "needs"]
    applies: Callable[[Model], bool]
    words: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether one engine takes a model in a layout, why not or how, and what it needs for it."""

    engine: Engine
    word: Word
    reasons: tuple[str, ...]
    needs: tuple[str, ...]


_ALL: Final = ("vllm", "sglang")
_TRTLLM: Final = ("trtllm-bf16",)
_MARLIN: Final = ("marlin-",)
_VLLM_ROUTINGS: Final = {
    *("DeepSeekV3", "Llama4", "Renormalize", "RenormalizeNaive", "SigmoidRenorm"),
    *("MiniMax2", "Sigmoid", UNTOLD),
}
_VLLM_MARLIN: Final = {
    True: {"silu", "gelu", "gelu_tanh", "situ", "swigluoai", "swiglustep"},
    False: {"silu", "gelu", "gelu_tanh", "relu2"},
}
_SGLANG_MARLIN: Final = {True: {"silu", "situ", "swigluoai"}, False: {"silu", "relu2"}}
_VLLM_DROPPED: Final = ("dots1", "minimax")
_SGLANG_ABSENT: Final = ("aria", "aria_text", "dots1", "flex_olmo", "jamba", "minimax")
_MOST_EXPERTS: Final = 2048
_SGLANG_CT_UNITS: Final = (128, 64)

_ALL_TO_ALL: Final = (
    "only its all-to-all path takes {routing} routing: start it with `--data-parallel-size` "
    "above 1, `--enable-expert-parallel` and an `--all2all-backend` that is neither "
    "`allgather_reducescatter` nor `deepep_high_throughput`"
)

ROWS: Final = (
    Row(
        ("vllm",),
        _TRTLLM,
        "no",
        lambda model: model.activation != ("silu" if model.gated else "relu2"),
        "its kernel takes SiLU with a gate and squared ReLU without one; these use {activation}",
    ),
    Row(
        ("sglang",),
        _TRTLLM,
        "no",
        lambda model: model.activation not in ({"silu"} if model.gated else {"silu", "relu2"}),
        "its kernel takes SiLU, and squared ReLU without a gate; these use {activation}",
    ),
    Row(
        ("vllm",),
        _TRTLLM,
        "no",
        lambda model: model.family == "step3.5" and model.is_clamped,
        "it computes the layers with a limit on gate and up with `swiglustep`, which its kernel "
        "does not take",
    ),
    Row(
        _ALL,
        _TRTLLM,
        "no",
        lambda model: model.experts > _MOST_EXPERTS,
        f"its kernel routes to at most {_MOST_EXPERTS} experts; there are {{experts}}",
    ),
    Row(
        ("vllm",),
        (*_TRTLLM, *_MARLIN),
        "no",
        lambda model: model.model_type in _VLLM_DROPPED,
        "it no longer has the model {model_type}",
    ),
    Row(
        ("vllm",),
        ("marlin-mxfp4",),
        "no",
        lambda model: model.model_type in VLLM_TRANSFORMERS,
        "it runs {model_type} with the code of transformers, and not in MXFP4",
    ),
    Row(
        ("vllm",),
        _MARLIN,
        "no",
        lambda model: model.activation not in _VLLM_MARLIN[model.gated],
        "its Marlin path does not know the activation {activation}",
    ),
    Row(
        ("sglang",),
        _MARLIN,
        "no",
        lambda model: model.activation not in _SGLANG_MARLIN[model.gated],
        "its Marlin path does not take the activation {activation}",
    ),
    Row(
        ("sglang",),
        ("marlin-nvfp4-sglang",),
        "no",
        lambda model: any(_is_odd_for_sglang(kind) for kind in model.kinds),
        "its method for compressed-tensors NVFP4 needs a hidden size that is a multiple of 128 "
        "and an intermediate size that is one of 64",
    ),
    Row(
        ("vllm",),
        _TRTLLM,
        "but",
        lambda model: model.routing not in _VLLM_ROUTINGS,
        _ALL_TO_ALL,
    ),
    Row(
        ("vllm",),
        _TRTLLM,
        "but",
        lambda model: model.routing == UNTOLD,
        "`config.json` does not say whether the weights of a token's experts are renormalised "
        "(`norm_topk_prob`); if they are not, only its all-to-all path takes the model",
    ),
    Row(
        _ALL,
        _TRTLLM,
        "but",
        lambda model: model.is_clamped and model.family != "step3.5",
        "the model limits gate and up, which its kernel does not: results differ from the model's",
    ),
    Row(
        ("sglang",),
        (*_TRTLLM, *_MARLIN),
        "but",
        lambda model: model.model_type in _SGLANG_ABSENT,
        "it has no model of its own for {model_type}, and its general one was not tried",
    ),
    Row(
        _ALL,
        (*_TRTLLM, *_MARLIN),
        "but",
        lambda model: model.experts % 2 == 1,
        "{experts} experts do not divide among an even number of expert-parallel ranks",
    ),
    Row(_ALL, _TRTLLM, "needs", lambda _: True, "a GPU of compute capability 10.0 or 10.3"),
    Row(("vllm",), _MARLIN, "needs", lambda _: True, "compute capability 7.5 or more"),
    Row(("sglang",), ("marlin-nvfp4",), "needs", lambda _: True, "compute capability 8.0 or more"),
    Row(("sglang",), ("marlin-mxfp4",), "needs", lambda _: True, "compute capability 9.0 or more"),
    Row(
        _ALL,
        _MARLIN,
        "needs",
        lambda _: True,
        "on Blackwell it is a fallback: there are native FP4 kernels there",
    ),
)
"""All that an engine does not take. A layout's name, or what several begin with, selects rows."""


def answers(layout: Layout, model: Model) -> tuple[Answer, ...]:
    """Return what each engine of a layout says to a model."""
    return tuple(_answer(layout, engine, model) for engine in layout.engines)


def check_engines(layout: Layout, model: Model) -> tuple[str, ...]:
    """Return what to warn of.

    Raises
    ------
    UnsupportedError
        No engine takes this model in this layout: nobody could use the bytes.
    """
    found = answers(layout, model)
    said = tuple(
        f"{answer.engine.name} {answer.engine.versions}: {reason}"
        for answer in found
        for reason in answer.reasons
    )
    if all(answer.word == "no" for answer in found):
        message = f"no engine takes this model in the layout {layout.id}: {'; '.join(said)}"
        raise UnsupportedError(message, hint="`moeconv inspect` says what else can be made of it")
    return said


_START: Final = {
    "vllm": "vllm serve {out} --load-format moeconv {flags}",
    "sglang": "python -m sglang.launch_server --model-path {out} {flags}",
}
"""How an engine is started on a converted directory."""


def make_command(layout: Layout) -> str:
    """Return the command that makes a layout, without the program and the checkpoint."""
    is_other = layout.engines[0].name == "sglang"
    return f"{layout.command} --engine sglang" if is_other else layout.command


def start_command(engine: Engine, model: str) -> str | None:
    """Return the command that serves a model; `None` for an unknown engine.

    `model` is as it is typed: a directory, or a repository and its revision.
    """
    command = _START.get(engine.name)
    return command and command.format(out=model, flags=engine.backend)


def start_commands(layout: Layout, model: Model, out: Path) -> tuple[str, ...]:
    """Return the commands of the engines that take a model in this layout."""
    takers = (answer.engine for answer in answers(layout, model) if answer.word != "no")
    return tuple(filter(None, (start_command(engine, typed(out)) for engine in takers)))


def _answer(layout: Layout, engine: Engine, model: Model) -> Answer:
    rows = [
        row
        for row in ROWS
        if engine.name in row.engines and layout.id.startswith(row.layouts) and row.applies(model)
    ]
    facts = {**asdict(model), "experts": model.experts}
    said = {
        weight: tuple(row.words.format(**facts) for row in rows if row.weight == weight)
        for weight in ("no", "but", "needs")
    }
    word: Word = "no" if said["no"] else "yes, but" if said["but"] else "yes"
    return Answer(engine, word, said["no"] or said["but"], said["needs"])


def _is_odd_for_sglang(kind: Kind) -> bool:
    hidden, intermediate = _SGLANG_CT_UNITS
    is_odd = kind.hidden % hidden or kind.intermediate % intermediate
    return kind.scheme == "ct-nvfp4" and bool(is_odd)
