"""Which of vLLM's MoE methods reads which layout, and what is left of its transform then?

Mirrors vLLM 0.33.0: the tails of `process_weights_after_loading` in
`unquantized_fused_moe_method.py`, `modelopt.py`, `mxfp4.py`, and
`compressed_tensors_moe_w4a4_nvfp4.py`, `…_w4a4_mxfp4.py`, `…_w4a8_mxfp4.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from moeconv.serving.methods import Method

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from moeconv.layouts.layout import Geometry
    from moeconv.serving.probe import Own


def _own(layer: RoutedExperts) -> None:
    """Build the kernel by the method's own function for it."""
    layer.quant_method._build_moe_kernel(layer)


def _flagged(layer: RoutedExperts) -> None:
    """Run the method's transform, which builds the kernel only, told that weights are processed."""
    from vllm.model_executor.utils import weights_already_processed

    with weights_already_processed():
        layer.quant_method.process_weights_after_loading(layer)


def _nvfp4(layer: RoutedExperts) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import make_nvfp4_moe_kernel

    method = layer.quant_method
    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    method.moe_kernel = make_nvfp4_moe_kernel(
        moe_quant_config=method.moe_quant_config,
        moe_config=method.moe,
        experts_cls=method.experts_cls,
        backend=method.nvfp4_backend,
        routing_tables=layer._expert_routing_tables(),
    )
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _mxfp4(layer: RoutedExperts) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import make_mxfp4_moe_kernel

    method = layer.quant_method
    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    method.moe_kernel = make_mxfp4_moe_kernel(
        moe_quant_config=method.moe_quant_config,
        moe_config=method.moe,
        mxfp4_backend=method.mxfp4_backend,
        experts_cls=method.experts_cls,
        routing_tables=layer._expert_routing_tables(),
    )
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


_LAYERS: Final = "vllm.model_executor.layers"
_CT: Final = f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors_moe"
_MARLIN: Final = frozenset({"MarlinExperts"})
_MARLIN_REMEDY: Final = "start it with `--moe-backend marlin`"
_INPUT_SCALES: Final = ("w13_input_scale", "w2_input_scale")
_PACKED: Final = {"w13_weight": "w13_weight_packed", "w2_weight": "w2_weight_packed"}

METHODS: Final = (
    Method(
        f"{_LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        frozenset({"trtllm-bf16"}),
        "FLASHINFER_TRTLLM",
        "start it with `--moe-backend flashinfer_trtllm`",
        _flagged,
        frozenset({"TrtLlmBf16ExpertsMonolithic", "TrtLlmBf16ExpertsModular"}),
        keeps_shape=True,
    ),
    Method(
        f"{_LAYERS}.quantization.modelopt:ModelOptNvFp4FusedMoE",
        frozenset({"marlin-nvfp4"}),
        "MARLIN",
        _MARLIN_REMEDY,
        _own,
        _MARLIN,
        unread=_INPUT_SCALES,
        pads_late=True,
    ),
    Method(
        f"{_CT}.compressed_tensors_moe_w4a4_nvfp4:CompressedTensorsW4A4Nvfp4MoEMethod",
        frozenset({"marlin-nvfp4"}),
        "MARLIN",
        _MARLIN_REMEDY,
        _nvfp4,
        _MARLIN,
        sources=_PACKED,
        fresh=frozenset({"w13_weight_scale_2", "w2_weight_scale_2"}),
        drop=(
            "w13_weight_global_scale",
            "w2_weight_global_scale",
            "w13_input_global_scale",
            "w2_input_global_scale",
        ),
        unread=_INPUT_SCALES,
        pads_late=True,
    ),
    Method(
        f"{_LAYERS}.quantization.mxfp4:GptOssMxfp4MoEMethod",
        frozenset({"marlin-mxfp4-gptoss"}),
        "MARLIN",
        _MARLIN_REMEDY,
        _mxfp4,
        _MARLIN,
    ),
    Method(
        f"{_LAYERS}.quantization.mxfp4:Mxfp4MoEMethod",
        frozenset({"marlin-mxfp4"}),
        "MARLIN",
        _MARLIN_REMEDY,
        _own,
        _MARLIN,
    ),
    Method(
        f"{_CT}.compressed_tensors_moe_w4a8_mxfp4:CompressedTensorsW4A8Mxfp4MoEMethod",
        frozenset(
            {"marlin-mxfp4", "marlin-mxfp4-ct"}
        ),  # which are the same where nothing is padded
        "MARLIN",
        _MARLIN_REMEDY,
        _own,
        _MARLIN,
        sources=_PACKED,
    ),
    # It takes no flag, and says MARLIN also where it uses CUTLASS: the experts class tells.
    Method(
        f"{_CT}.compressed_tensors_moe_w4a4_mxfp4:CompressedTensorsW4A4Mxfp4MoEMethod",
        frozenset({"marlin-mxfp4-ct"}),
        "MARLIN",
        "vLLM has its own FP4 kernel on this GPU: load the original checkpoint",
        _mxfp4,
        _MARLIN,
        sources=_PACKED,
    ),
)


def own_functions(layout: str, device: torch.device) -> dict[str, Own]:
    """Return vLLM's own functions that lay weights out, by parameter, for the probe."""
    if layout == "trtllm-bf16":
        from flashinfer.fused_moe import core as _  # what they call  # noqa: F401
        from vllm.model_executor.layers.quantization.utils import flashinfer_utils

        convert = flashinfer_utils.convert_moe_weights_to_flashinfer_trtllm_block_layout

        def both(matrix: torch.Tensor, sizes: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
            weight = matrix.view(torch.bfloat16)[None]
            return convert({}, weight.clone(), weight.clone(), is_gated_act_gemm=sizes.gated)

        return {
            "w13_weight": lambda matrix, sizes: both(matrix, sizes)[0],
            "w2_weight": lambda matrix, sizes: both(matrix, sizes)[1],
        }
    from vllm import _custom_ops

    def repack(matrix: torch.Tensor, _: Geometry) -> torch.Tensor:
        words = matrix.view(torch.int32).T.contiguous().to(device)
        return _custom_ops.gptq_marlin_repack(words, 2 * matrix.shape[1], matrix.shape[0], 4)

    return {"w13_weight": repack, "w2_weight": repack}
