"""How does vLLM 0.33 take it? `vllm serve ./converted --load-format moeconv --moe-backend …`.

The model is built as always. Each `RoutedExperts` module gets this rank's bytes in its parameters'
own storage; all other tensors go through the model's own `load_weights`. Then the transform of each
such module is replaced, for one call, by its tail, which only builds the kernel.

Mirrors the order of events in vLLM 0.33.0, `model_loader/base_loader.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import vllm
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from moeconv.errors import UnsupportedError
from moeconv.output.manifest import MANIFEST_NAME
from moeconv.serving import probe
from moeconv.serving.admission import check_dtype, engine_entry, options, refuse
from moeconv.serving.placing import (
    Assigned,
    Method,
    check_coverage,
    check_new,
    check_pairs,
    check_sizes,
    finish,
    pair,
    passed_through,
    place_all,
)
from moeconv.serving.reader import ConvertedDirectory, open_converted
from moeconv.serving.vllm_methods import METHODS, own_functions

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.models.interfaces_base import VllmModel

    from moeconv.output.manifest import StackEntry
    from moeconv.serving.reader import Rank, RankTensor

LOAD_FORMAT: Final = "moeconv"

_BACKENDS: Final = ("unquantized_backend", "nvfp4_backend", "mxfp4_backend")
_logger = init_logger("vllm.moeconv")


def register() -> None:
    """Register the load format; vLLM calls this in every process, more than once."""
    if LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(LOAD_FORMAT)(MoeconvLoader)


class MoeconvLoader(BaseModelLoader):
    """Loads a converted directory.

    vLLM constructs it twice. It has no `get_all_weights`, so vLLM itself refuses to reload from
    disk.
    """

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        """Refuse what can be refused; vLLM calls this before it builds any model."""
        with self._open(vllm_config.model_config) as converted:
            _admit(converted, vllm_config, vllm_config.model_config)
        return 0

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch a model of the Hub."""
        self._open(model_config).close()

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        """Build the model and load it."""
        is_draft = model_config.runner_type == "draft"
        if is_draft and not (self._root(model_config) / MANIFEST_NAME).exists():
            return self._default().load_model(vllm_config, model_config, prefix)
        with self._open(model_config) as converted:
            _admit(converted, vllm_config, model_config)
            _untie(converted, model_config)
        self._vllm_config = vllm_config
        return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def load_weights(self, model: VllmModel, model_config: ModelConfig) -> None:
        """Fill a model that is built, and not filled yet."""
        threads, check = options(self.load_config.model_loader_extra_config)
        modules = _expert_modules(model)
        with self._open(model_config) as converted:
            # A draft's own experts (MTP) are never converted; its names may be the main model's.
            is_draft = model_config.runner_type == "draft"
            jobs = [] if is_draft else self._assign(converted, model, modules)
            started_s = time.perf_counter()
            if jobs:
                device = next(jobs[0].module.parameters()).device
                found = probe.check(converted, lambda: own_functions(converted.layout.id, device))
                _logger.info("Layout %s against vLLM's own: %s", converted.layout.id, found)
            place_all(jobs, _install, threads=threads, check=check)
            _report(jobs, time.perf_counter() - started_s)
            loaded = model.load_weights(self._passed_through(converted, model))
        _check_rest(modules, {job.name for job in jobs}, loaded)
        for job in jobs:
            finish(job)
            for name in job.method.unread:
                setattr(job.module, name, None)
            _replace_transform(job)

    def _assign(
        self,
        converted: ConvertedDirectory,
        model: VllmModel,
        modules: Mapping[str, RoutedExperts],
    ) -> list[Assigned]:
        """Decide who reads what; no byte is read before all of it is sound."""
        stacks = converted.manifest.stacks
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        rename = mapper.get_rename_mapper().map_name if mapper is not None else str
        paired = pair(modules, stacks, rename)
        is_staged = self._vllm_config.parallel_config.pipeline_parallel_size > 1
        check_pairs(paired, stacks, is_staged=is_staged)
        ranks: dict[tuple[int, int, int, int], Rank] = {}
        return [
            _assigned(converted, name, modules[name], stack, ranks)
            for name, stack in paired.items()
        ]

    def _passed_through(
        self, converted: ConvertedDirectory, model: VllmModel
    ) -> Iterator[tuple[str, torch.Tensor]]:
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

        config = self.load_config
        unused = getattr(model, "is_unused_checkpoint_weight", None)
        for name, tensor in safetensors_weights_iterator(
            [str(file) for file in converted.weight_files()],
            config.use_tqdm_on_load,
            config.safetensors_load_strategy,
        ):
            if unused is None or not unused(name):
                yield name, tensor
        for source in getattr(model, "secondary_weights", ()):
            yield from self._default()._get_weights_iterator(source)

    def _default(self) -> BaseModelLoader:
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        return DefaultModelLoader(
            dataclasses.replace(self.load_config, load_format="auto", model_loader_extra_config={})
        )

    def _open(self, model_config: ModelConfig) -> ConvertedDirectory:
        return open_converted(self._root(model_config))

    def _root(self, model_config: ModelConfig) -> Path:
        root = Path(model_config.model)
        if root.is_dir():
            return root
        from huggingface_hub import snapshot_download

        cache = self.load_config.download_dir
        return Path(snapshot_download(str(root), revision=model_config.revision, cache_dir=cache))


def _admit(converted: ConvertedDirectory, config: VllmConfig, model_config: ModelConfig) -> None:
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


def _untie(converted: ConvertedDirectory, model_config: ModelConfig) -> None:
    """Do as vLLM where a checkpoint has its own `lm_head`: it looks at top-level files only."""
    config = model_config.hf_config
    has_head = any(name.endswith("lm_head.weight") for name in passed_through(converted))
    if has_head and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
        model_config.word_embeddings_untied_by_checkpoint = True


def _expert_modules(model: VllmModel) -> dict[str, RoutedExperts]:
    """Return expert modules by the path of their owner, `….mlp.experts`, in the model's order."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return {
        name.removesuffix(".routed_experts"): module
        for name, module in model.named_modules()
        if isinstance(module, RoutedExperts)
    }


def _assigned(
    converted: ConvertedDirectory,
    name: str,
    layer: RoutedExperts,
    stack: StackEntry,
    ranks: dict[tuple[int, int, int, int], Rank],
) -> Assigned:
    """Hold one module against its stack, and return what it reads."""
    check_new(name, layer)
    config = layer.moe_config
    hidden = config.hidden_dim_unpadded or config.hidden_dim
    sizes = (config.num_experts, hidden, config.intermediate_size, config.is_act_and_mul)
    check_sizes(name, stack, sizes)
    method = _method(converted, name, layer)
    parallel = config.moe_parallel_config
    if parallel.use_ep and layer.expert_map_manager.placement_strategy != "linear":
        message = f"`{name}`: experts are dealt out round-robin"
        raise UnsupportedError(f"{message}: start with `--expert-placement-strategy linear`")
    key = (parallel.tp_size, parallel.tp_rank, parallel.ep_size, parallel.ep_rank)
    if key not in ranks:
        ranks[key] = converted.rank(tp_size=key[0], tp_rank=key[1], ep_size=key[2], ep_rank=key[3])
    job = Assigned(name, layer, method, ranks[key], ranks[key].tensors(stack.prefix))
    check_coverage(job)
    return job


def _method(converted: ConvertedDirectory, name: str, layer: RoutedExperts) -> Method:
    """Return the row of a layer's method, if vLLM chose what the files are made for."""
    quant, layout = layer.quant_method, converted.manifest.layout.id
    method = next((row for row in METHODS if row.matches(quant, layout)), None)
    if method is None:
        kind = type(quant).__name__
        message = f"`{name}`: vLLM uses {kind} here, which does not read the layout {layout}"
        raise UnsupportedError(message)
    backend = next(getattr(quant, name) for name in _BACKENDS if hasattr(quant, name))
    experts = getattr(quant.experts_cls, "__name__", str(quant.experts_cls))
    method.check(name, backend.name, experts)
    return method


def _install(job: Assigned, tensor: RankTensor, data: torch.Tensor) -> None:
    """Put filled memory into the module; the Parameter object stays, as in `replace_parameter`."""
    source = job.method.sources.get(tensor.param, tensor.param)
    if tensor.param in job.method.fresh:
        parameter = torch.nn.Parameter(data, requires_grad=False)
        job.module.register_parameter(tensor.param, parameter)
        return
    parameter = job.module.get_parameter(source)
    parameter.data = data
    if source != tensor.param:
        delattr(job.module, source)
        job.module.register_parameter(tensor.param, parameter)


def _replace_transform(job: Assigned) -> None:
    """Let the tail stand in for the transform, once: reloads of a checkpoint transform again."""
    layer: RoutedExperts = job.module
    quant = layer.quant_method

    def once(layer: RoutedExperts) -> None:
        vars(quant).pop("process_weights_after_loading", None)
        job.method.finish(layer)

    # Not by setattr: some methods are modules, which keep a register of their own.
    object.__setattr__(quant, "process_weights_after_loading", once)


def _check_rest(
    modules: Mapping[str, RoutedExperts], placed: set[str], loaded: set[str] | None
) -> None:
    """Refuse expert modules that nothing filled: vLLM does not miss them."""
    for name, module in modules.items():
        wanted = {
            f"{name}.routed_experts.{param}"
            for param, _ in module.named_parameters(recurse=False)
            if param.startswith(("w13_weight", "w2_weight"))
        }
        if name not in placed and not wanted <= (loaded or set()):
            message = f"`{name}` has neither converted tensors nor those of the checkpoint"
            raise UnsupportedError(message)


def _report(jobs: list[Assigned], seconds: float) -> None:
    nbytes = sum(tensor.read_bytes for job in jobs for tensor in job.tensors)
    if jobs:
        _logger.info(
            "Read %.2f GB of experts of %d layers in %.3f s (%.1f GB/s)",
            nbytes / 1e9,
            len(jobs),
            seconds,
            nbytes / 1e9 / max(seconds, 1e-9),
        )
