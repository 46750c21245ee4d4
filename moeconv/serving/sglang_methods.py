"""Which of SGLang's MoE methods reads which layout, and what does its transform leave behind?

Mirrors SGLang 0.5.23: `process_weights_after_loading` in `unquant.py`, `modelopt_quant.py`,
`mxfp4.py` and `compressed_tensors_w4a16_nvfp4_moe.py`, and `marlin_utils_fp4.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from moeconv.serving.methods import Method

if TYPE_CHECKING:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    from moeconv.layouts.layout import Geometry
    from moeconv.serving.probe import Own


def _nothing(layer: FusedMoE) -> None:
    """Leave the layer to SGLang: it does not transform weights that have the blocks' shape."""


def _workspace(layer: FusedMoE) -> None:
    """Set what `prepare_moe_*_layer_for_marlin` sets."""
    from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace

    layer.workspace = marlin_make_workspace(layer.w13_weight.device, 4)


def _unscaled(layer: FusedMoE) -> None:
    """Give the input scales, which Marlin does not read, a value: nothing else writes them."""
    _workspace(layer)
    for name in _INPUT_SCALES:
        getattr(layer, name).data.fill_(1)


def _mxfp4(layer: FusedMoE) -> None:
    _workspace(layer)
    layer._mxfp4_backend = "marlin"


_QUANT: Final = "sglang.srt.layers.quantization"
_MARLIN_REMEDY: Final = "start it with `--moe-runner-backend marlin`"
_SCALES: Final = frozenset({"w13_weight_scale_2", "w2_weight_scale_2"})
_INPUT_SCALES: Final = ("w13_input_scale", "w2_input_scale")

METHODS: Final = (
    Method(
        f"{_QUANT}.unquant:UnquantizedFusedMoEMethod",
        frozenset({"trtllm-bf16"}),
        "FLASHINFER_TRTLLM",
        "start it with `--moe-runner-backend flashinfer_trtllm`",
        _nothing,
    ),
    Method(
        f"{_QUANT}.modelopt_quant:ModelOptNvFp4FusedMoEMethod",
        frozenset({"marlin-nvfp4-sglang"}),
        "MARLIN",
        _MARLIN_REMEDY,
        _unscaled,
        fresh=_SCALES,
        unread=(*_INPUT_SCALES, "w13_blockscale_swizzled", "w2_blockscale_swizzled"),
        pads_late=True,
    ),
    Method(
        f"{_QUANT}.compressed_tensors.schemes.compressed_tensors_w4a16_nvfp4_moe"
        ":CompressedTensorsW4A16Nvfp4MoE",
        frozenset({"marlin-nvfp4-sglang"}),
        "MARLIN",
        _MARLIN_REMEDY,
        _workspace,
        sources={"w13_weight": "w13_weight_packed", "w2_weight": "w2_weight_packed"},
        fresh=_SCALES,
        drop=(
            "w13_weight_global_scale",
            "w2_weight_global_scale",
            "w13_input_global_scale",
            "w2_input_global_scale",
        ),
    ),
    Method(
        f"{_QUANT}.mxfp4:Mxfp4MoEMethod",
        frozenset({"marlin-mxfp4-gptoss-sglang"}),
        "MARLIN",
        _MARLIN_REMEDY,
        _mxfp4,
    ),
)


def own_functions(layout: str) -> dict[str, Own]:
    """Return SGLang's own functions that lay weights out, by parameter, for the probe.

    Marlin's repack is compiled where it is first called, which takes longer than a load.
    """
    if layout != "trtllm-bf16":
        message = "SGLang compiles its repack when it is first called"
        raise ImportError(message)
    from flashinfer.fused_moe import core

    def blocks(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return core.convert_to_block_layout(matrix[index.to(matrix.device)].contiguous(), 128)

    def fused(matrix: torch.Tensor, sizes: Geometry) -> torch.Tensor:
        if sizes.gated:  # SGLang loads up above gate
            matrix = torch.cat((*reversed(matrix.chunk(2)),))
        index = core._maybe_get_cached_w3_w1_permute_indices(
            {}, matrix, 128, is_gated_act_gemm=sizes.gated
        )
        return blocks(matrix, index)

    def down(matrix: torch.Tensor, _: Geometry) -> torch.Tensor:
        return blocks(matrix, core.get_w2_permute_indices_with_cache({}, matrix, 128))

    return {"w13_weight": fused, "w2_weight": down}
