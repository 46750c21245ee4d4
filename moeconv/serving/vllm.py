"""How does vLLM 0.33 take it? `vllm serve ./converted --load-format moeconv --moe-backend …`.

The model is built as always. Each `RoutedExperts` module gets this rank's bytes in its parameters'
own storage; all other tensors go through the model's own `load_weights`. Then the transform of each
such module is replaced, for one call, by its tail, which only builds the kernel.

Mirrors the order of events in vLLM 0.33.0, `model_loader/base_loader.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import torch
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from moeconv.errors import UnsupportedError
from moeconv.serving import probe
from moeconv.serving.admission import options
from moeconv.serving.fetching import fetch, is_converted
from moeconv.serving.heap import only_new_garbage
from moeconv.serving.methods import find_method
from moeconv.serving.pairing import (
    Assigned,
    check_coverage,
    check_pairs,
    check_sizes,
    pair,
)
from moeconv.serving.placing import check_new, finish, place_all
from moeconv.serving.reader import ConvertedDirectory, open_converted
from moeconv.serving.vllm_admission import admit, untie
from moeconv.serving.vllm_methods import METHODS, own_functions

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.models.interfaces_base import VllmModel

    from moeconv.output.manifest import StackEntry
    from moeconv.serving.rank import RankTensor

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
            admit(converted, vllm_config, vllm_config.model_config)
        return 0

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch a model of the Hub."""
        self._open(model_config).close()

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        """Build the model and load it."""
        is_draft = model_config.runner_type == "draft"
        if is_draft and not is_converted(*self._named(model_config)):
            return self._default().load_model(vllm_config, model_config, prefix)
        with self._open(model_config) as converted:
            admit(converted, vllm_config, model_config)
            untie(converted, model_config)
        with only_new_garbage():
            return super().load_model(
                vllm_config=vllm_config, model_config=model_config, prefix=prefix
            )

    def load_weights(self, model: VllmModel, model_config: ModelConfig) -> None:
        """Fill a model that is built, and not filled yet."""
        threads, check = options(self.load_config.model_loader_extra_config)
        modules = _expert_modules(model)
        with self._open(model_config) as converted:
            # A draft's own experts (MTP) are never converted; its names may be the main model's.
            is_draft = model_config.runner_type == "draft"
            jobs = [] if is_draft else _assign(converted, model, modules)
            if jobs:
                device = next(jobs[0].module.parameters()).device
                found = probe.check(converted, lambda: own_functions(converted.layout.id, device))
                _logger.info("Layout %s against vLLM's own: %s", converted.layout.id, found)
                done = place_all(jobs, _install, threads=threads, check=check)
                _logger.info("%s", done)
            loaded = model.load_weights(self._passed_through(converted, model))
        _check_rest(modules, {job.name for job in jobs}, loaded)
        for job in jobs:
            finish(job)
            for name in job.method.unread:
                setattr(job.module, name, None)
            _replace_transform(job)

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
        return open_converted(fetch(*self._named(model_config)))

    def _named(self, model_config: ModelConfig) -> tuple[str, str | None, str | None]:
        return model_config.model, model_config.revision, self.load_config.download_dir


def _expert_modules(model: VllmModel) -> dict[str, RoutedExperts]:
    """Return expert modules by the path of their owner, `….mlp.experts`, in the model's order."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return {
        name.removesuffix(".routed_experts"): module
        for name, module in model.named_modules()
        if isinstance(module, RoutedExperts)
    }


def _assign(
    converted: ConvertedDirectory, model: VllmModel, modules: Mapping[str, RoutedExperts]
) -> list[Assigned]:
    """Decide who reads what; no byte is read before all of it is sound."""
    stacks = converted.manifest.stacks
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = mapper.get_rename_mapper().map_name if mapper is not None else str
    paired = pair(modules, stacks, rename)
    check_pairs(paired, stacks, is_staged=get_pp_group().world_size > 1)
    return [_assigned(converted, name, modules[name], stack) for name, stack in paired.items()]


def _assigned(
    converted: ConvertedDirectory,
    name: str,
    layer: RoutedExperts,
    stack: StackEntry,
) -> Assigned:
    """Hold one module against its stack, and return what it reads."""
    check_new(name, layer)
    config = layer.moe_config
    hidden = config.hidden_dim_unpadded or config.hidden_dim
    sizes = (config.num_experts, hidden, config.intermediate_size, config.is_act_and_mul)
    check_sizes(name, stack, sizes)
    quant = layer.quant_method
    method = find_method(METHODS, name, quant, converted.layout.id)
    backend = next(getattr(quant, name) for name in _BACKENDS if hasattr(quant, name))
    experts = getattr(quant.experts_cls, "__name__", str(quant.experts_cls))
    method.check(name, backend.name, experts)
    parallel = config.moe_parallel_config
    if parallel.use_ep and layer.expert_map_manager.placement_strategy != "linear":
        message = f"`{name}`: experts are dealt out round-robin"
        raise UnsupportedError(f"{message}: start with `--expert-placement-strategy linear`")
    rank = converted.rank(
        tp_size=parallel.tp_size,
        tp_rank=parallel.tp_rank,
        ep_size=parallel.ep_size,
        ep_rank=parallel.ep_rank,
    )
    job = Assigned(name, layer, method, rank, rank.tensors(stack.prefix))
    check_coverage(job)
    return job


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
