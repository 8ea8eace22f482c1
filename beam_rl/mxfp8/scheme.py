"""Which of Beam's weights are MXFP8, by their HF names: the one answer for trainer, sync, engine and export.

All projections of attention (its output gate's too), dense MLPs and experts are. Routers, norms, gate biases, embedding
and head never are, and a run may keep whole layers at either end of the model as they were. Knows nothing about
Megatron, vLLM or the values of weights.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from beam_rl.mxfp8 import BLOCK
from beam_rl.mxfp8.format import quantize

PROJECTION = re.compile(
    r"model\.layers\.(\d+)\.(?:self_attn\.(?:q|k|v|gate|o)_proj|mlp\.(?:experts\.\d+\.)?(?:gate|up|down)_proj)\.weight"
)
SCALE = "_scale"  # of vLLM's MXFP8 checkpoints: `x.weight` (float8_e4m3fn) has `x.weight_scale` (uint8)


@dataclass(frozen=True)
class Scheme:
    """Made by `scheme_of`."""

    num_layers: int
    keep_first_layers: int = 0
    keep_last_layers: int = 0
    activations: bool = True  # what the weights are multiplied with is rounded too, else BF16

    def has_layer(self, layer: int) -> bool:
        """Whether the projections of this layer, counted from 0, are MXFP8."""
        return self.keep_first_layers <= layer < self.num_layers - self.keep_last_layers

    def has(self, name: str) -> bool:
        """Whether the tensor of this HF name is MXFP8."""
        match = PROJECTION.fullmatch(name)
        return match is not None and self.has_layer(int(match[1]))

    def scale_name(self, name: str) -> str:
        """The name of the scales, (outputs, inputs / 32), of an MXFP8 weight (outputs, inputs)."""
        return name + SCALE

    def names(self, names: Iterable[str]) -> Iterator[str]:
        """Of a checkpoint whose tensors without MXFP8 have these names."""
        for name in names:
            yield name
            if self.has(name):
                yield self.scale_name(name)

    def hf_config(self) -> dict[str, Any]:
        """`quantization_config` of such a checkpoint's config.json, as NVIDIA's ModelOpt writes it and vLLM reads it."""
        kept = [i for i in range(self.num_layers) if not self.has_layer(i)]
        ignored = ["lm_head", "*.mlp.gate", *(f"model.layers.{i}.*" for i in kept)]
        return {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ignored}

    def quantized(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """A model's HF tensors as MXFP8 has them: an MXFP8 weight becomes its payload, then its scales; others stay, as
        do those that are MXFP8 already.

        Blocks run along a weight's inputs, so the parts of a weight that is cut along its outputs, or along its inputs
        where 32 divides, have the bits of the whole.
        """
        for name, tensor in tensors:
            if not self.has(name) or tensor.dtype == torch.float8_e4m3fn:
                yield name, tensor
                continue
            q = quantize(tensor.bfloat16())  # as the trainer holds it, whatever a checkpoint's file has
            yield name, q.payload
            yield self.scale_name(name), q.scales


def scheme_of(
    hf: Any,
    keep_first_layers: int = 0,
    keep_last_layers: int = 0,
    activations: bool = True,
    tp: int = 1,
    expert_tp: int = 1,
) -> Scheme:
    """The scheme of a model.

    Args:
        hf: transformers' BeamConfig. tp, expert_tp: ranks that split the inputs of an attention's or dense MLP's output
            projection, and of an expert's.
    Raises:
        ValueError: no layer is left, or a rank's part of a weight's inputs is no whole number of blocks.
    """
    kept = keep_first_layers + keep_last_layers
    if kept >= hf.num_hidden_layers:
        raise ValueError(
            f"mxfp8.keep_first_layers + keep_last_layers = {kept}: the model has {hf.num_hidden_layers} layers, so none "
            "would be MXFP8; use BF16, or keep fewer"
        )
    for what, size, ranks in (
        ("hidden_size", hf.hidden_size, 1),
        ("num_attention_heads · head_dim", hf.num_attention_heads * hf.head_dim, tp),
        ("intermediate_size", hf.intermediate_size, tp),
        ("moe_intermediate_size", hf.moe_intermediate_size, expert_tp),
    ):
        if size % (BLOCK * ranks):
            over = f" over {ranks} tensor-parallel ranks" if ranks > 1 else ""
            raise ValueError(
                f"MXFP8 has blocks of {BLOCK} inputs, which do not divide the model's {what} = {size}{over}"
            )
    return Scheme(hf.num_hidden_layers, keep_first_layers, keep_last_layers, activations)
