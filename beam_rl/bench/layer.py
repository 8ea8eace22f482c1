"""A Beam layer of the trainer, forward and backward, beside Megatron's own MoE layer of the same shapes.

Both have the same matrices: Q, K, V with an output gate, the same experts of which a token takes as many. Megatron's has
no norms after its sub-layers and no scaled residuals; what these cost, the fused kernels have to hide.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from beam_rl.bench.result import AsJson, Result, show
from beam_rl.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

WARM_UP, RUNS = 2, 8  # the fastest counts
HEAD_DIM, TOP_K, GROUPS, WINDOW = 128, 8, 8, 512


@dataclass(frozen=True)
class Case:
    """sample: tokens of each of the samples that are packed."""

    tokens: int
    sample: int
    hidden: int
    heads: int
    kv_heads: int
    expert: int
    experts: int
    dtype: str


ON_GPU = Case(16384, 2048, 5120, 48, 8, 2560, 64, "bf16")  # of the 501B model, but for the number of experts
ON_CPU = Case(1024, 256, 256, 4, 2, 128, 16, "fp32")


@dataclass(frozen=True)
class Measured:
    forward_seconds: float
    both_seconds: float
    peak_bytes: int


def layer(
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a micro-batch.", show_default="16384 on a GPU, 1024 on a CPU")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(min=2 * TOP_K, help="Experts of the layer.", show_default="64 on a GPU, 16 on a CPU")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """One layer with experts and a sliding window, as the trainer runs it, beside a plain Megatron MoE layer.

    The figure is the seconds of a forward and a backward pass of Beam's layer, the limit those of Megatron's. On a GPU also
    Beam's layer without the fused kernels.
    """
    from beam_rl.bench import measure

    case = ON_GPU if measure.device().type == "cuda" else ON_CPU
    case = replace(case, tokens=tokens or case.tokens, experts=experts or case.experts)
    if case.tokens % case.sample:
        raise InputError(f"--tokens {case.tokens}: samples have {case.sample} tokens; use a multiple")
    if case.experts % GROUPS:
        raise InputError(f"--experts {case.experts}: Beam's are in {GROUPS} groups; use a multiple")
    show(bench(case), as_json)


def bench(case: Case) -> Result:
    """Measures the layers one after the other, each in a process of its own."""
    from beam_rl.bench import measure

    where = measure.device()
    typer.echo("measuring Beam's layer and Megatron's, one after the other", err=True)
    kinds = ["plain", "beam", *(["unfused"] if where.type == "cuda" else [])]
    found: dict[str, Measured] = {kind: measure.in_fresh_process(run, kind, case) for kind in kinds}
    detail: dict[str, Any] = {**asdict(case), "top_k": TOP_K, "window": WINDOW}
    for kind, measured in found.items():
        detail |= {f"{kind}_{name}": value for name, value in asdict(measured).items()}
    detail["beam_tflops"] = 3 * forward_flops(case) / found["beam"].both_seconds / 1e12
    machine = measure.machine(where)
    return Result("layer", found["beam"].both_seconds, "s", found["plain"].both_seconds, machine, detail)


def forward_flops(case: Case) -> float:
    """Of the products with weights and of attention inside the window, causality counted."""
    wide, narrow = case.heads * HEAD_DIM, case.kv_heads * HEAD_DIM
    weights = case.hidden * (3 * wide + 2 * narrow + case.experts) + TOP_K * 3 * case.hidden * case.expert
    keys = min(WINDOW, case.sample) * (1 - min(WINDOW, case.sample) / (2 * case.sample))  # a query's, on average
    return 2.0 * case.tokens * (weights + 2 * keys * wide)


def run(kind: str, case: Case) -> Measured:
    """Seconds and peak memory of one kind of layer: "beam", "unfused" or "plain"."""
    import torch

    from beam_rl.bench import measure
    from beam_rl.megatron import compat

    compat.install()
    _alone()
    where = measure.device()
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    forward, module = (_plain if kind == "plain" else _beam)(case, dtype, where)
    if kind == "unfused":
        from beam_rl.megatron import kernels

        kernels.DTYPES = (torch.half, torch.half)  # so no kernel is for this layer
    _fill(module)
    x = torch.randn(case.tokens, 1, case.hidden, dtype=dtype, device=where).requires_grad_()
    upstream = torch.randn_like(x)

    def both() -> None:
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None
        forward(x).backward(upstream)

    with torch.no_grad():
        forward_seconds = _fastest(lambda: forward(x), where)
    measure.held(where)
    return Measured(forward_seconds, _fastest(both, where), measure.high_water(where))


def _alone() -> None:
    """This process becomes the only rank."""
    import torch
    import torch.distributed as dist
    from megatron.core import tensor_parallel

    from beam_rl.megatron.ranks import form_groups
    from beam_rl.recipe.tree import Parallel

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    form_groups(Parallel(), 600)
    tensor_parallel.model_parallel_cuda_manual_seed(0)


def _fastest(work: Callable[[], Any], where: Any) -> float:
    from beam_rl.bench import measure

    return min([measure.seconds(work, where) for _ in range(WARM_UP + RUNS)][WARM_UP:])


def _fill(module: "nn.Module") -> None:
    """Small random weights: the router then spreads the tokens about evenly."""
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1)


Forward = Callable[["Tensor"], "Tensor"]


def _beam(case: Case, dtype: Any, where: Any) -> tuple[Forward, "nn.Module"]:
    import torch
    from transformers import BeamConfig

    from beam_rl.megatron.model import build_chunks, config_from_hf
    from beam_rl.megatron.packing import pack

    hf = BeamConfig(
        vocab_size=128,
        hidden_size=case.hidden,
        intermediate_size=case.expert,
        moe_intermediate_size=case.expert,
        num_hidden_layers=1,
        mlp_layer_types=["sparse"],
        layer_types=["sliding_attention"],
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=HEAD_DIM,
        sliding_window=WINDOW,
        num_experts=case.experts,
        num_experts_per_tok=TOP_K,
        n_group=GROUPS,
        topk_group=GROUPS // 2,
        max_position_embeddings=case.sample,
    )
    (model,) = build_chunks(config_from_hf(hf, dtype, where))
    module = model.to(where).decoder.layers[0]
    cu_tokens = torch.arange(0, case.tokens + 1, case.sample, dtype=torch.int32, device=where)
    return lambda x: module(x, None, packed_seq_params=pack(cu_tokens))[0], module


def _plain(case: Case, dtype: Any, where: Any) -> tuple[Forward, "nn.Module"]:
    """Packed like Beam's on a GPU; on a CPU, where Megatron has no packed attention, the samples are a batch."""
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.spec_utils import build_module

    from beam_rl.megatron import compat
    from beam_rl.megatron.packing import pack

    te = compat.has_transformer_engine()
    spec: Any = specs.get_gpt_layer_with_transformer_engine_spec if te else specs.get_gpt_layer_local_spec
    made = spec(num_experts=case.experts, moe_grouped_gemm=te, qk_layernorm=True)
    module = build_module(made, config=_plain_config(case, dtype, te), layer_number=1).to(where)
    rotary = RotaryEmbedding(HEAD_DIM, 1.0, use_cpu_initialization=not te)(case.sample).to(where)
    if te:
        cu_tokens = torch.arange(0, case.tokens + 1, case.sample, dtype=torch.int32, device=where)
        return lambda x: module(x, None, rotary_pos_emb=rotary, packed_seq_params=pack(cu_tokens))[0], module
    mask = torch.ones(case.sample, case.sample, dtype=torch.bool, device=where).triu(1)[None, None]

    def batched(x: "Tensor") -> "Tensor":
        samples = x.view(-1, case.sample, case.hidden).transpose(0, 1)
        out = module(samples, mask, rotary_pos_emb=rotary)[0]
        return out.transpose(0, 1).reshape(x.shape)

    return batched, module


def _plain_config(case: Case, dtype: Any, te: bool) -> Any:
    """With what of Megatron's own fusions there is."""
    import torch
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        ffn_hidden_size=case.expert,
        moe_ffn_hidden_size=case.expert,
        num_attention_heads=case.heads,
        num_query_groups=case.kv_heads,
        kv_channels=HEAD_DIM,
        qk_layernorm=True,
        attention_output_gate=True,
        window_size=(WINDOW - 1, 0),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=case.experts,
        moe_router_topk=TOP_K,
        moe_router_num_groups=GROUPS,
        moe_router_group_topk=GROUPS // 2,
        moe_router_score_function="sigmoid",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=te,
        moe_permute_fusion=te,
        bias_activation_fusion=te,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        use_cpu_initialization=not te,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
