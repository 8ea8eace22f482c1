"""vLLM's own Beam (0.33, NVIDIA) with support for adapters, its fused numerics kept.

Its modules take vLLM's adapters as they are, the four attention inputs in one matrix included. Only what reads a weight past
its module has to be switched off.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.models.beam import BeamForCausalLM as NativeBeam

from beam_rl.rollout import mxfp8


class BeamForCausalLM(NativeBeam, SupportsLoRA):
    """Without adapters, exactly vLLM's Beam."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.takes_adapters = vllm_config.lora_config is not None
        self.scheme = mxfp8.of_config(vllm_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """What the scheme has as MXFP8 and comes as BF16, as a checkpoint's weights do, is quantized here."""
        return super().load_weights(self.scheme.quantized(weights) if self.scheme else weights)

    def process_weights_after_loading(self) -> None:
        """Leaves out what the base class does here with adapters: its GEMM for few tokens would pass them by."""
        if not self.takes_adapters:
            super().process_weights_after_loading()
