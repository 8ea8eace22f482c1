"""MXFP8 in training: Megatron's linear layers with products of MXFP8 operands, on any machine.

Of each product both operands are quantized along the dimension that it sums over: inputs in the forward pass, outputs in
the input's gradient, tokens in the weight's. Sums are those of a BF16 product. So a weight is rounded in two ways, and
its gradient is exact with respect to neither: the semantics of Transformer Engine's MXFP8 recipe, which takes the place
of these layers where the GPU multiplies MXFP8 itself. Parameters stay BF16, and FP32 in the optimizer. Which layers are
MXFP8 is `beam_rl.mxfp8.scheme`'s to say.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from beam_rl.megatron import compat
from beam_rl.mxfp8 import BLOCK
from beam_rl.mxfp8.format import rounded
from beam_rl.mxfp8.scheme import Scheme

NATIVE_CAPABILITY = (10, 0)  # Blackwell


def is_native(scheme: Scheme) -> bool:
    """Whether Transformer Engine does it: on a GPU that multiplies MXFP8, and rounds activations too."""
    capable = compat.has_transformer_engine() and torch.cuda.get_device_capability() >= NATIVE_CAPABILITY
    return capable and scheme.activations


def who_multiplies(scheme: Scheme) -> str:
    """For the log."""
    if is_native(scheme):
        return "Transformer Engine multiplies MXFP8 on this GPU"
    operands = "operands" if scheme.activations else "weights"
    return f"emulated: {operands} are rounded to MXFP8 and multiplied as BF16"


def native_fields(scheme: Scheme) -> dict[str, Any]:
    """Transformer Engine's MXFP8 recipe, by Megatron's names.

    Parameters stay BF16 (`fp8_param` is off), and Transformer Engine keeps what it quantizes of them, in both directions,
    for all micro-batches of an update. Megatron's own MXFP8 parameters would need as much memory, their main parameters
    would start from values before the checkpoint was loaded, and no other part of this package could write to them.
    """
    return dict(
        fp8="e4m3",
        fp8_recipe="mxfp8",
        first_last_layers_bf16=bool(scheme.keep_first_layers or scheme.keep_last_layers),
        num_layers_at_start_in_bf16=scheme.keep_first_layers,
        num_layers_at_end_in_bf16=scheme.keep_last_layers,
    )


def checkpoint(config: Any, function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, computed again in the backward pass: in MXFP8 too where Transformer Engine has been told so."""
    if not config.fp8:
        return tensor_parallel.checkpoint(function, False, *inputs)
    from megatron.core.extensions.transformer_engine import te_checkpoint

    states = tensor_parallel.random.get_cuda_rng_tracker
    return te_checkpoint(function, False, states, parallel_state.get_tensor_model_parallel_group(), *inputs)


class Product(torch.autograd.Function):
    """x · weightᵀ, (…, inputs) and (outputs, inputs), whose three products have MXFP8 operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return rounded(x) @ rounded(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (_rounded(rows, 1) @ _rounded(weight, 0)).view(*grad.shape[:-1], weight.shape[1])
        if x is not None:
            grad_weight = _rounded(rows, 0).t() @ _rounded(x.reshape(-1, x.shape[-1]), 0)
        return grad_x, grad_weight


class WeightProduct(torch.autograd.Function):
    """The same with activations and gradients left in BF16; the weight is rounded along its inputs in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return x @ rounded(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ rounded(weight) if ctx.needs_input_grad[0] else None
        if x is None:
            return grad_x, None
        return grad_x, grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def _rounded(matrix: Tensor, dim: int) -> Tensor:
    """The matrix in blocks along `dim`, which zeros fill up to whole blocks."""
    missing = -matrix.shape[dim] % BLOCK
    return rounded(F.pad(matrix, (0, missing) if dim else (0, 0, 0, missing)) if missing else matrix, dim)


class _Emulated:
    """One of Megatron's linear layers with another product; what ranks exchange around it is Megatron's."""

    config: Any

    def _forward_impl(
        self, input: Tensor, weight: Tensor, *, allreduce_dgrad: bool, sequence_parallel: bool, tp_group: Any, **_: Any
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        product = Product if self.config.mxfp8.activations else WeightProduct
        return product.apply(input, weight)


class Mxfp8ColumnParallelLinear(_Emulated, ColumnParallelLinear):
    pass


class Mxfp8RowParallelLinear(_Emulated, RowParallelLinear):
    pass
