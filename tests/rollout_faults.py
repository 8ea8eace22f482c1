"""Prints as JSON which of vLLM's faults, that `beam_rl.rollout.compat` works around, are still there.

A program of its own: it imports vLLM and sets up its process groups, which a test process should not have done.
"""

import inspect
import json
import tempfile
from dataclasses import fields, replace

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.lora.layers import LoRAMapping
from vllm.lora.ops.torch_ops import bgmv_shrink
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    select_unquantized_moe_backend,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from beam_rl.rollout import compat
from beam_rl.rollout.expert_stacks import ExpertStacks


def reload_leaves_experts_unpacked() -> bool:
    """Loads stock CPU experts twice; True if the second weights are not in the kernel's packed layout."""
    moe = FusedMoEFactory(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32, params_dtype=torch.float32)
    layer = moe.routed_experts
    is_packed = []
    for _ in range(2):
        weight = torch.randn(4, 64, 64)
        layer.w13_weight.data = weight.clone().view(layer.w13_weight.shape)
        layer.w2_weight.data = torch.randn(4, 64, 32).view(layer.w2_weight.shape)
        layer.quant_method.process_weights_after_loading(layer)
        packed = cpu_prepack_moe_weight(weight, layer.quant_method.moe_kernel.fused_experts.isa)
        is_packed.append(torch.equal(layer.w13_weight.data.view(packed.shape), packed))
    assert is_packed[0], "the first load is right"
    return not is_packed[1]


def partial_prefill_rewinds_cpu_generators() -> bool:
    """True if vLLM winds generators back by their offset and CPU generators have none."""
    try:
        torch.Generator().get_offset()
    except RuntimeError:
        return "set_offset" in inspect.getsource(GPUModelRunner._bookkeeping_sync)
    return False


def base_tokens_get_the_last_adapter() -> bool:
    """True if vLLM's torch kernels take slot −1, which means no adapter, for the last one."""
    out = torch.zeros(2, 4)
    bgmv_shrink(torch.ones(2, 8), torch.ones(3, 1, 4, 8), out, torch.tensor([-1, 0]))
    assert out[1].all(), "a token with an adapter is right"
    return bool(out[0].any())


def repaired_linear_leaves_base_tokens_alone() -> bool:
    """True if the addition that takes those kernels' place gives each token its own adapter, or none."""
    compat.repair_adapter_linear()
    wrapper = PunicaWrapperCPU(max_num_batched_tokens=8, max_batches=8, device="cpu")
    wrapper.update_metadata(LoRAMapping((7, 0, 9, 0), (7, 0, 9, 0), is_prefill=True), [9, 7], 3, 64)
    x, y = torch.randn(4, 8), torch.zeros(4, 5)
    a, b = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 5, 2)
    wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (5,))
    wanted = torch.stack([b[1, 0] @ a[1, 0] @ x[0], torch.zeros(5), b[0, 0] @ a[0, 0] @ x[2], torch.zeros(5)])
    return torch.allclose(y, wanted, atol=1e-6)


def all_layers_have_the_largest_rank() -> bool:
    """True if vLLM's configuration knows one rank for all layers."""
    return [f.name for f in fields(LoRAConfig) if "rank" in f.name] == ["max_lora_rank"]


def allowed_rank_is_the_least_that_fits() -> bool:
    """True if every adapter gets the least `max_lora_rank` that vLLM takes for it, and one too large an error."""
    found = [compat.allowed_rank(rank) for rank in (1, 2, 8, 12, 64, 400)]
    try:
        compat.allowed_rank(600)
    except ValueError as error:
        return found == [1, 8, 8, 16, 64, 512] and "rank 600: vLLM has room for rank 512 at most" in str(error)
    return False


def adapters_choose_a_gpu_kernel_for_experts() -> bool:
    """True if vLLM picks Triton for experts with adapters on a CPU."""
    moe = FusedMoEFactory(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32, prefix="lora.experts")
    with_adapters = replace(moe.moe_config, is_lora_enabled=True)
    return select_unquantized_moe_backend(with_adapters)[0] == UnquantizedMoeBackend.TRITON


def half_a_reload_counts_with_the_next() -> bool:
    """True if a layer that got its first half twice, in two updates, is taken for complete."""
    layer = torch.nn.Module()
    layer.first, layer.second = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    record_metadata_for_reloading(layer)
    for value in (5.0, 1.0):
        initialize_layerwise_reload(layer)
        layer.first.weight_loader(layer.first, torch.full((4,), value))
    return not get_layerwise_info(layer).can_load()


def a_reload_runs_each_loader_twice() -> bool:
    """True if vLLM loads every tensor of a reload once more, only to count what it is."""
    layer, calls = torch.nn.Module(), []
    layer.only = torch.nn.Parameter(torch.zeros(4))

    def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        calls.append(param)
        param.data.copy_(loaded_weight)

    layer.only.weight_loader = load
    record_metadata_for_reloading(layer)
    initialize_layerwise_reload(layer)
    layer.only.weight_loader(layer.only, torch.ones(4))
    assert layer.only.eq(1).all()
    return len(calls) == 2


def stacked_experts_are_those_loaded_one_by_one() -> bool:
    """True if vLLM's loader takes a stack of experts for what they are one by one, and nothing is left to load so."""
    torch.manual_seed(0)
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    weights = [(f"{e}.{name}.weight", torch.randn(shape)) for e in range(4) for name, shape in shapes.items()]
    by_one, stacked = torch.nn.Module(), torch.nn.Module()
    for i, model in enumerate((by_one, stacked)):
        model.experts = FusedMoEFactory(
            num_experts=4,
            top_k=2,
            hidden_size=64,
            intermediate_size=32,
            params_dtype=torch.float32,
            prefix=f"{i}.experts",
        )
    assert list(by_one.experts.load_weights(weights))
    stacks = ExpertStacks(torch.nn.ModuleDict({"mlp": stacked}))
    left = list(stacks.others((f"mlp.experts.{name}", weight) for name, weight in weights))
    wanted, found = (dict(m.experts.routed_experts.named_parameters()) for m in (by_one, stacked))
    return not left and not stacks.coming and all(torch.equal(found[name], wanted[name]) for name in wanted)


def mxfp8_layers_get_new_locks_with_new_weights() -> bool:
    """True if a kernel forgets, when weights are loaded again, the locks that a CUDA graph was captured with."""
    from vllm.model_executor.kernels.linear.mxfp8 import humming

    for name in (
        "convert_linear_layer_to_humming_standard",
        "quant_key_to_input_schema",
        "prepare_humming_linear_layer_config",
        "get_humming_linear_compute_config",
    ):
        setattr(humming, name, lambda *args, **kwargs: None)
    humming.create_humming_locks = lambda device: torch.zeros(8, dtype=torch.int32, device=device)
    kernel, layer = object.__new__(humming.HummingMxfp8LinearKernel), torch.nn.Module()
    layer.weight, layer.weight_scale = (torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), False) for _ in range(2))
    locks = []
    for _ in range(2):
        kernel.process_weights_after_loading(layer)
        locks.append(kernel.locks)
    compat.keep_over_reloads(humming.HummingMxfp8LinearKernel, "locks")
    kernel.process_weights_after_loading(layer)
    assert kernel.locks is locks[1]
    return locks[0] is not locks[1]


def drafted_tokens_lose_their_temperature() -> bool:
    """True if vLLM's CPU path forgets what it spreads over drafted tokens; ours does not."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    temperatures, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    stock = torch.full((5,), -1.0)
    cpu_triton_utils._expand_kernel_impl(stock, temperatures, ends, 0, 1)
    compat.repair_draft_temperatures()
    ours = rejection_sampler.expand_batch_to_tokens(temperatures, ends, 5, 0, 1)
    assert ours.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0] and ours.dtype == temperatures.dtype
    return not torch.equal(stock, ours)


if __name__ == "__main__":
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1)
        faults = [
            reload_leaves_experts_unpacked,
            partial_prefill_rewinds_cpu_generators,
            base_tokens_get_the_last_adapter,
            repaired_linear_leaves_base_tokens_alone,
            all_layers_have_the_largest_rank,
            allowed_rank_is_the_least_that_fits,
            adapters_choose_a_gpu_kernel_for_experts,
            half_a_reload_counts_with_the_next,
            a_reload_runs_each_loader_twice,
            stacked_experts_are_those_loaded_one_by_one,
            mxfp8_layers_get_new_locks_with_new_weights,
            drafted_tokens_lose_their_temperature,
        ]
        print(json.dumps({fault.__name__: fault() for fault in faults}))
