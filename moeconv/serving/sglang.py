"""How does SGLang 0.5.23 take it? `--model-path ./converted --moe-runner-backend …`, no other flag.

There is one hook, on `get_model_loader`: a converted directory gets this loader. SGLang only logs
when a plugin fails, so nothing may hang on two hooks being there together. Without this one
SGLang's own loader finds no weights at the top level of the directory and stops.

The loader is no `DefaultModelLoader`, so SGLang itself refuses to update weights from a converted
directory and to overlap its start. It runs the engine's transforms, but not for the modules that
it filled.

Mirrors SGLang 0.5.23, `model_loader/loader.py`: `DefaultModelLoader.load_model` and
`postprocess_weights`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import sglang
import torch
from sglang.srt.model_loader import loader as engine
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_server_args

from moeconv.errors import UnsupportedError
from moeconv.serving import probe
from moeconv.serving.admission import check_dtype, engine_entry, options, refuse
from moeconv.serving.fetching import fetch, is_converted
from moeconv.serving.methods import find_method
from moeconv.serving.pairing import (
    Assigned,
    check_coverage,
    check_pairs,
    check_sizes,
    pair,
    passed_through,
)
from moeconv.serving.placing import check_new, finish, place_all
from moeconv.serving.reader import ConvertedDirectory, open_converted
from moeconv.serving.sglang_methods import METHODS, own_functions
from moeconv.tensors import round_up

if TYPE_CHECKING:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.server_args import ServerArgs

    from moeconv.output.manifest import StackEntry
    from moeconv.serving.rank import RankTensor

_TARGET: Final = "sglang.srt.model_loader.loader.get_model_loader"
_ENGINE_PAD: Final = 128
"""To a multiple of this SGLang pads a rank's share of the intermediate size, where it pads."""

_logger = logging.getLogger(__name__)


def register() -> None:
    """Set the hook on the choice of a loader; SGLang calls this in every process."""
    HookRegistry.register(_TARGET, _choose_loader, HookType.AROUND)


def _choose_loader(
    original: Callable[[LoadConfig, ModelConfig | None], engine.BaseModelLoader],
    load_config: LoadConfig,
    model_config: ModelConfig | None = None,
) -> engine.BaseModelLoader:
    """Return our loader for a converted directory, unless dummy weights are asked for."""
    is_dummy = load_config.load_format == engine.LoadFormat.DUMMY
    if model_config is None or is_dummy:
        return original(load_config, model_config)
    if is_converted(*_named(load_config, model_config)):
        return MoeconvLoader(load_config)
    return original(load_config, model_config)


def _named(
    load_config: LoadConfig, model_config: ModelConfig
) -> tuple[str, str | None, str | None]:
    return model_config.model_path, model_config.revision, load_config.download_dir


class MoeconvLoader(engine.BaseModelLoader):
    """Loads a converted directory."""

    counter_after_loading_weights: float = 0.0

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch a model of the Hub."""
        fetch(*_named(self.load_config, model_config))

    def load_model(
        self, *, model_config: ModelConfig, device_config: DeviceConfig
    ) -> torch.nn.Module:
        """Build the model and load it."""
        extra = self.load_config.model_loader_extra_config or {}
        threads, check = options(extra if isinstance(extra, dict) else {"extra": extra})
        device = torch.device(device_config.device)
        with open_converted(fetch(*_named(self.load_config, model_config))) as converted:
            _admit(converted, model_config)
            quant_config = engine._get_quantization_config(model_config, self.load_config)
            with engine.set_default_torch_dtype(model_config.dtype):
                with device:
                    model = engine._initialize_model(model_config, self.load_config, quant_config)
                modules = _expert_modules(model)
                # A draft's own experts (MTP) are never converted; its names may be another's.
                is_draft = model_config.is_draft_model
                jobs = [] if is_draft else _assign(converted, model, modules)
                _place(converted, jobs, threads=threads, check=check)
                _check_rest(converted, modules, {job.name for job in jobs})
                engine.DefaultModelLoader.load_weights_only(
                    model, _passed_through(converted), device
                )
                for job in jobs:
                    finish(job)
                    job.method.finish(job.module)
                _transform_rest(model, device, {id(job.module) for job in jobs})
        self.counter_after_loading_weights = time.perf_counter()
        return model.eval()


def _admit(converted: ConvertedDirectory, model_config: ModelConfig) -> None:
    """Refuse a start that the files or this loader cannot serve."""
    engine_entry(converted, "sglang", sglang.__version__)
    check_dtype(converted, model_config.dtype)
    args: ServerArgs = get_server_args()
    is_balanced = args.enable_eplb or args.ep_num_redundant_experts
    refuse(
        converted.root,
        (
            "`--enable-eplb` and redundant experts move experts between ranks: leave them out"
            if is_balanced
            else None,
            f"experts start in their places only: leave out `--init-expert-location "
            f"{args.init_expert_location}`"
            if args.init_expert_location != "trivial"
            else None,
            "LoRA changes the MoE layers: leave out `--enable-lora` and `--lora-paths`"
            if args.enable_lora or args.lora_paths
            else None,
            "weights cannot be offloaded: leave out `--cpu-offload-gb` and `--offload-group-size`"
            if args.cpu_offload_gb or args.offload_group_size > 0
            else None,
            "`--enable-paged-experts` moves experts: leave it out"
            if getattr(args, "enable_paged_experts", False)
            else None,
        ),
    )


def _expert_modules(model: torch.nn.Module) -> dict[str, FusedMoE]:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return {name: module for name, module in model.named_modules() if isinstance(module, FusedMoE)}


def _assign(
    converted: ConvertedDirectory, model: torch.nn.Module, modules: Mapping[str, FusedMoE]
) -> list[Assigned]:
    """Decide who reads what; no byte is read before all of it is sound."""
    stacks = converted.manifest.stacks
    mapper = getattr(model, "hf_to_sglang_mapper", None)
    rename = mapper._map_name if mapper is not None else str
    paired = pair(modules, stacks, rename)
    check_pairs(paired, stacks, is_staged=get_server_args().pp_size > 1)
    return [_assigned(converted, name, modules[name], stack) for name, stack in paired.items()]


def _assigned(
    converted: ConvertedDirectory,
    name: str,
    layer: FusedMoE,
    stack: StackEntry,
) -> Assigned:
    """Hold one module against its stack, and return what it reads."""
    check_new(name, layer)
    if layer.num_fused_shared_experts:
        message = f"`{name}`: SGLang fuses shared experts into the routed ones here"
        raise UnsupportedError(f"{message}: start it with `--disable-shared-experts-fusion`")
    held, share = layer.intermediate_size_per_partition, stack.intermediate // layer.moe_tp_size
    is_whole = held in {share, round_up(share, _ENGINE_PAD)}
    sizes = (
        layer.num_experts,
        layer.hidden_size_unpadded,
        stack.intermediate if is_whole else held * layer.moe_tp_size,
        layer.moe_runner_config.is_gated,
    )
    check_sizes(name, stack, sizes)
    quant = getattr(layer, "scheme", None) or layer.quant_method
    method = find_method(METHODS, name, quant, converted.layout.id)
    backend = getattr(layer.runner_backend, "name", method.backend)
    if method.backend == "MARLIN" and not getattr(quant, "use_marlin", True):
        backend = "another backend"
    method.check(name, backend, type(quant).__name__)
    rank = converted.rank(
        tp_size=layer.moe_tp_size,
        tp_rank=layer.moe_tp_rank,
        ep_size=layer.moe_ep_size,
        ep_rank=layer.moe_ep_rank,
    )
    job = Assigned(name, layer, method, rank, rank.tensors(stack.prefix))
    check_coverage(job)
    return job


def _place(
    converted: ConvertedDirectory, jobs: list[Assigned], *, threads: int | None, check: bool
) -> None:
    if not jobs:
        return
    layout = converted.layout.id
    found = probe.check(converted, lambda: own_functions(layout))
    _logger.info("layout %s against SGLang's own: %s", layout, found)
    _logger.info("%s", place_all(jobs, _install, threads=threads, check=check))


def _install(job: Assigned, tensor: RankTensor, data: torch.Tensor) -> None:
    """Put filled memory into the module, as its transform leaves it."""
    source = job.method.sources.get(tensor.param, tensor.param)
    if "trtllm-bf16" in job.method.layouts:  # SGLang keeps the Parameter, and its loader, here
        job.module.get_parameter(source).data = data
        return
    if tensor.param not in job.method.fresh or source in dict(job.module.named_parameters()):
        delattr(job.module, source)
    parameter = torch.nn.Parameter(data, requires_grad=False)
    job.module.register_parameter(tensor.param, parameter)


def _passed_through(converted: ConvertedDirectory) -> Iterator[tuple[str, torch.Tensor]]:
    from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator

    yield from safetensors_weights_iterator([str(file) for file in converted.weight_files()])


def _check_rest(
    converted: ConvertedDirectory, modules: Mapping[str, FusedMoE], placed: set[str]
) -> None:
    """Refuse expert modules that nothing will fill: SGLang does not miss them."""
    names = list(passed_through(converted))
    for name in set(modules) - placed:
        number = re.search(r"\.(\d+)\.", name)
        layer = rf"(^|\.){number[1]}\..*" if number else ""
        if not any(re.search(rf"{layer}\bexperts\.", passed) for passed in names):
            message = f"`{name}` has neither converted tensors nor those of the checkpoint"
            raise UnsupportedError(message)


def _transform_rest(model: torch.nn.Module, device: torch.device, placed: set[int]) -> None:
    """Run the transform of every module but those that are filled."""
    for module, quant_method in engine._modules_with_quant_method(model):
        if id(module) not in placed:
            with engine.device_loading_context(module, device):
                quant_method.process_weights_after_loading(module)
