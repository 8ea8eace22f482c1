"""Prints as JSON which of vLLM's faults, that `beam_rl.rollout.compat` works around, are still there.

A program of its own: it imports vLLM and sets up its process groups, which a test process should not have done.
"""

import inspect
import json
import tempfile

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


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


if __name__ == "__main__":
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1)
        faults = [reload_leaves_experts_unpacked, partial_prefill_rewinds_cpu_generators]
        print(json.dumps({fault.__name__: fault() for fault in faults}))
