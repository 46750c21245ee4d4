"""May vLLM 0.33 load this directory, as it was started? And has the model a head of its own?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm
from vllm import envs

from moeconv.serving.admission import check_dtype, engine_entry, refuse
from moeconv.serving.pairing import passed_through

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from moeconv.serving.reader import ConvertedDirectory


def admit(converted: ConvertedDirectory, config: VllmConfig, model_config: ModelConfig) -> None:
    """Refuse a start that the files or this loader cannot serve."""
    entry = engine_entry(converted, "vllm", vllm.__version__)
    check_dtype(converted, model_config.dtype)
    parallel, offload = config.parallel_config, config.offload_config
    backend = config.kernel_config.moe_backend
    is_offloaded = offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0
    is_marlin = "marlin" in entry.backend
    multimodal = model_config.multimodal_config
    refuse(
        converted.root,
        (
            None
            if backend in {"auto", entry.backend.split()[-1]}
            else f"the files are not for `--moe-backend {backend}`: use `{entry.backend}`",
            "`--enable-eplb` moves experts between ranks: leave it out"
            if parallel.enable_eplb
            else None,
            "`--enable-lora` changes the MoE kernel: leave it out"
            if config.lora_config is not None
            else None,
            "weights cannot be offloaded: leave out `--cpu-offload-gb` and `--offload-group-size`"
            if is_offloaded
            else None,
            "VLLM_MARLIN_INPUT_DTYPE changes what Marlin reads: unset it"
            if is_marlin and envs.VLLM_MARLIN_INPUT_DTYPE is not None
            else None,
            "`--mm-encoder-only` has no experts to load: use the original checkpoint"
            if multimodal is not None and multimodal.mm_encoder_only
            else None,
        ),
    )


def untie(converted: ConvertedDirectory, model_config: ModelConfig) -> None:
    """Do as vLLM where a checkpoint has its own `lm_head`: it looks at top-level files only."""
    config = model_config.hf_config
    has_head = any(name.endswith("lm_head.weight") for name in passed_through(converted))
    if has_head and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
        model_config.word_embeddings_untied_by_checkpoint = True
