"""Megatron's own MoE layers with a router that can be told its choice: for every model but Beam, which has its own.

A layer takes its column of the micro-batch's routes from the `Pack` that it is called with, also when it is computed
again in the backward pass, so that several micro-batches may be under way. The weights of replayed experts are the
router's own scores of them, with their gradient. Knows nothing about any one model.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from beam_rl.megatron.packing import Agreement, Pack
from beam_rl.megatron.router import count_agreement

Asked = tuple[
    Tensor | None, Agreement | None
]  # (tokens, top-k) experts to use, and what counts the router's own choice
NOTHING: Asked = (None, None)


class ForeignLayer(Exception):
    """A layer that is not Megatron's own; the message names what it has."""


class ReplayRouter(TopKRouter):
    """Megatron's top-k router; with `asked` it weighs the experts that it was told, by its own scores of them."""

    asked: Asked = NOTHING

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (tokens, experts) the weights, zero where not chosen, and the choice as booleans."""
        routes, agreement = self.asked
        logits = logits.view(-1, self.config.num_moe_experts)
        if routes is None:
            return self._weights(logits, None)
        if agreement is not None:
            with torch.no_grad():
                own = self._weights(logits, None)[1].nonzero()[:, 1].view(-1, self.topk)
            count_agreement(own, routes, agreement)
        return self._weights(logits, routes)

    def _weights(self, logits: Tensor, experts: Tensor | None) -> tuple[Tensor, Tensor]:
        config = self.config
        return topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            precomputed_indices=experts,
        )


class ReplayMoELayer(MoELayer):
    """Megatron's MoE layer, which hands its router what `ReplayLayer` has been asked."""

    asked: Asked = NOTHING
    moe_layer_recompute: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Recomputed here, with the routes of the forward pass: by then the router is at another micro-batch.
        self.recomputes, self.moe_layer_recompute = self.moe_layer_recompute, False

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        asked = self.asked

        def run(hidden: Tensor) -> Tensor:
            self.router.asked = asked
            try:
                return super(ReplayMoELayer, self).forward(hidden)[0]
            finally:
                self.router.asked = NOTHING

        if self.recomputes and self.training:
            return tensor_parallel.checkpoint(run, False, hidden), None
        return run(hidden), None


class ReplayLayer(TransformerLayer):
    """Megatron's layer, which finds its column in the pack's routes."""

    column: int | None = None  # of the routes that this rank has; None: none, the layer is dense

    def _forward_mlp(self, *args: Any, packed_seq_params: Pack, **kwargs: Any) -> Any:
        if self.column is not None:
            routes = packed_seq_params.routes
            chosen = None if routes is None else routes[:, self.column].long()
            self.mlp.asked = (chosen, packed_seq_params.agreement)
        return super()._forward_mlp(*args, packed_seq_params=packed_seq_params, **kwargs)


def replaying(spec: ModuleSpec) -> ModuleSpec:
    """The layer with these in the place of Megatron's. ForeignLayer for experts that are not in those.

    A layer without experts is left as it is.
    """
    mlp = spec.submodules.mlp
    if not isinstance(mlp, partial) or mlp.func is not MoELayer:
        if isinstance(mlp, ModuleSpec):
            raise ForeignLayer(f"an MLP that is a {mlp.module.__name__}")
        return spec
    moe = mlp.keywords["submodules"]
    if spec.module is not TransformerLayer or moe.router is not TopKRouter:
        raise ForeignLayer(f"experts in a {spec.module.__name__}, with a {moe.router.__name__}")
    sparse = partial(ReplayMoELayer, submodules=replace(moe, router=ReplayRouter))
    return replace(spec, module=ReplayLayer, submodules=replace(spec.submodules, mlp=sparse))
