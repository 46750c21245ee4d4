"""What do others make of the same matrix? A verb on a path that shares nothing with the kernels.

A kernel and its inverse are built of the same row maps and tables, so that a fault in those undoes
itself. FlashInfer's own functions know nothing of them, and neither does plain torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeconv.layouts.verbs import K_BLOCK_BYTES, GlobalScale, RowBlocks

if TYPE_CHECKING:
    from moeconv.layouts.verbs import MarlinRows, MarlinWeight, Verb
    from moeconv.tensors import Bytes

_EPILOGUE_TILE = 128
"""vLLM 0.33.0, `convert_moe_weights_to_flashinfer_trtllm_block_layout`."""


def lay_out_apart(verb: Verb, source: Bytes, out: Bytes) -> str | None:
    """Fill `out` (flat bytes) with `source` (a host matrix) laid out by others, on the host.

    Takes up to eight times the memory of the matrix.

    Returns
    -------
    str | None
        Who did it: `FlashInfer` or `plain torch`. `None` where there is nobody: for a number, which
        has no order, and where the package is not installed or lacks the functions.
    """
    try:
        match verb:
            case RowBlocks():
                return _by_flashinfer(verb, source, out)
            case GlobalScale():
                return None
            case _:
                return _by_torch(verb, source, out)
    except ImportError:
        return None


def _by_flashinfer(verb: RowBlocks, source: Bytes, out: Bytes) -> str:
    """Call FlashInfer 0.7.4's public functions in the order in which vLLM 0.33.0 does."""
    import torch
    from flashinfer import reorder_rows_for_gated_act_gemm, shuffle_matrix_a
    from flashinfer.fused_moe import convert_to_block_layout

    rows = torch.from_numpy(source)
    if verb.gated:
        gate, up = rows.chunk(2)
        rows = reorder_rows_for_gated_act_gemm(torch.cat((up, gate)))
    blocks = convert_to_block_layout(shuffle_matrix_a(rows, _EPILOGUE_TILE), K_BLOCK_BYTES)
    units = blocks.view(len(blocks), -1, verb.unit_rows, K_BLOCK_BYTES).transpose(0, 1)
    torch.from_numpy(out).view(units.shape).copy_(units)
    return "FlashInfer"


def _by_torch(verb: MarlinWeight | MarlinRows, source: Bytes, out: Bytes) -> str:
    from moeconv.kernels.reference import ReferenceKernels

    ReferenceKernels().lay_out(verb, source, out)
    return "plain torch"
