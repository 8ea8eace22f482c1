"""MXFP8 in a vLLM engine: which weights, how vLLM is told, and the emulation on a CPU.

On a GPU vLLM's own kernels hold payload and scales. On a CPU weights are BF16 with exactly MXFP8's values, and what they
are multiplied with is rounded as the trainer rounds it.
"""

from dataclasses import asdict
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from beam_rl.mxfp8.format import rounded
from beam_rl.mxfp8.scheme import Scheme

MXFP8 = "beam_rl_mxfp8"  # key of vLLM's additional_config


def to_plain(scheme: Scheme) -> dict[str, Any]:
    """The scheme as plain values, for vLLM's configuration."""
    return asdict(scheme)


def of_config(vllm_config: Any) -> Scheme | None:
    """The scheme that this vLLM was started with, if any."""
    plain = vllm_config.additional_config.get(MXFP8) if vllm_config.additional_config else None
    return None if plain is None else Scheme(**plain)


class RoundedInputs(UnquantizedLinearMethod):
    """A linear layer that multiplies its weight with inputs rounded to MXFP8; an adapter gets them as they are."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().apply(layer, rounded(x), bias)


def round_inputs(*layers: Any) -> None:
    """Makes vLLM's CPU linears emulate MXFP8."""
    for layer in layers:
        layer.quant_method = RoundedInputs()
