"""Which layout does the person's word mean for this checkpoint?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from moeconv.errors import UnsupportedError
from moeconv.layouts import LAYOUTS, find_layout, named_layout
from moeconv.planning.modelconfig import first, model_types

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moeconv.checkpoint.types import Json
    from moeconv.layouts.layout import Layout
    from moeconv.planning.stacks import Stack

_DTYPES: Final = ("bfloat16", "float16")
_REBOUND: Final = ("kimi_k3",)
_W4A8_BITS: Final = 8


@dataclass(frozen=True, slots=True)
class Wish:
    """What the person asked for.

    Attributes
    ----------
    command
        The command: `trtllm` or `marlin-fp4`, or what another layout says makes it.
    scheme
        `nvfp4` or `mxfp4`, to be checked; `None` to take what is there.
    engine
        Whose bytes: `vllm` or `sglang`.
    dtype
        The serving dtype; `None` for the config's.
    reconciles
        Fold differing global scales into the larger one.
    layout
        The layout by name, to be checked; `None` to take what the others lead to.
    """

    command: str
    scheme: str | None = None
    engine: str = "vllm"
    dtype: str | None = None
    reconciles: bool = False
    layout: str | None = None


def wish_for(name: str) -> Wish:
    """Return the wish for the layout `name`, whatever command makes it.

    Raises
    ------
    UnsupportedError
        There is no such layout.
    """
    layout = named_layout(name)
    return Wish(layout.command, engine=layout.engines[0].name, layout=name)


def choose_layout(wish: Wish, stacks: Iterable[Stack], config: Mapping[str, Json]) -> Layout:
    """Return the layout for a checkpoint's experts.

    Raises
    ------
    UnsupportedError
        There is none for this command, engine, scheme and dtype.
    """
    mine = [layout for layout in LAYOUTS if layout.command == wish.command]
    if len(mine) == 1:
        return mine[0]  # nothing to choose; `fit` says what it does not take
    chosen = _choose_fp4(wish, mine, stacks, config)
    if wish.layout not in {None, chosen.id}:
        message = f"`{wish.layout}` was asked for, but these experts are for {chosen.id}"
        raise UnsupportedError(message, hint=f"`--layout {chosen.id}`, or `moeconv {wish.command}`")
    return chosen


def _choose_fp4(
    wish: Wish, mine: Iterable[Layout], stacks: Iterable[Stack], config: Mapping[str, Json]
) -> Layout:
    found = sorted({stack.scheme.name for stack in stacks})
    fp4 = [name for name in found if "fp4" in name]
    if not fp4:
        message = f"there are no FP4 experts: they are stored as {' and '.join(found)}"
        hint = "`moeconv trtllm` takes BF16 experts" if found == ["bf16"] else None
        raise UnsupportedError(message, hint=hint)
    if wish.scheme and wish.scheme not in fp4[0]:
        message = f"`--{wish.scheme}` was asked for, but the experts are stored as {fp4[0]}"
        raise UnsupportedError(message, hint="leave the flag out to take what is there")
    padded = fp4[0] == "ct-mxfp4" and _is_padded(config)
    for layout in mine:
        engines = {engine.name for engine in layout.engines}
        takes = "mxfp4" in layout.schemes if padded else fp4[0] in layout.schemes
        if takes and wish.engine in engines:
            dtype = _dtype(wish, config)
            return find_layout(layout.id, dtype, reconciles=wish.reconciles) or layout
    message = f"no Marlin layout of {wish.engine} takes {fp4[0]} experts"
    hint = "`--engine vllm` has one; SGLang pads these with bytes that it leaves undefined"
    raise UnsupportedError(message, hint=hint)


def _is_padded(config: Mapping[str, Json]) -> bool:
    """Say whether the engine runs compressed-tensors MXFP4 by its general method, which pads.

    vLLM 0.33.0: `CompressedTensorsW4A8Mxfp4MoEMethod` is a `Mxfp4MoEMethod`, and Kimi-K3 is loaded
    by that method itself; the W4A4 method pads nothing.
    """
    if set(model_types(config)) & set(_REBOUND):
        return True
    quantization = first(config, ("quantization_config", "compression_config"))
    groups = quantization.get("config_groups") if isinstance(quantization, dict) else None
    for group in groups.values() if isinstance(groups, dict) else ():
        inputs = group.get("input_activations") if isinstance(group, dict) else None
        if isinstance(inputs, dict) and inputs.get("num_bits") == _W4A8_BITS:
            return True
    return False


def _dtype(wish: Wish, config: Mapping[str, Json]) -> str:
    value = wish.dtype or first(config, ("dtype", "torch_dtype")) or _DTYPES[0]
    if value not in _DTYPES:
        message = f"the serving dtype is {value}, but Marlin serves in {' or '.join(_DTYPES)}"
        raise UnsupportedError(message, hint="say `--serving-dtype bfloat16`")
    return str(value)


def out_name(checkpoint: str, layout: Layout, tp: int | None) -> str:
    """Return the output directory's name where none is given."""
    made_for = "" if tp is None else f"-tp{tp}"
    engine = "-sglang" if layout.id.endswith("-sglang") else ""
    for kind in ("nvfp4", "mxfp4"):
        if layout.id.startswith(f"marlin-{kind}"):
            return f"{checkpoint}-marlin-{kind}{engine}{made_for}"
    return f"{checkpoint}-{layout.id}{made_for}"
