"""Beam's router: FP32 from the weight to the scores, group-limited choice, replay of an engine's choice.

The weight is created in FP32 and stays so in a BF16 model; it is trained, the correction bias is not. A replayed choice
comes as an argument, so that a recomputed layer sees the same one. Knows nothing about experts or dispatching.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import Router
from torch import Tensor

from beam_rl.megatron.packing import Agreement


def choose_experts(scores: Tensor, correction: Tensor, groups: int, top_groups: int, top_k: int) -> Tensor:
    """The top-k experts inside the best groups; a group is as good as the sum of its two best experts.

    scores: (tokens, experts) FP32; correction: (experts,) FP32, for the choice only. Returns (tokens, top-k) ids.
    """
    choice = scores + correction
    grouped = choice.view(len(choice), groups, -1)
    group_score = grouped.topk(2, dim=-1).values.sum(dim=-1)
    best = group_score.topk(top_groups, dim=-1).indices
    closed = torch.ones_like(group_score, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(closed[..., None], float("-inf")).flatten(1).topk(top_k, dim=-1).indices


def expert_weights(scores: Tensor, experts: Tensor) -> Tensor:
    """(tokens, top-k) the chosen experts' own scores, normalized to sum to one; the gradient reaches every score."""
    chosen = scores.gather(1, experts)
    return chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)


def count_agreement(own: Tensor, replayed: Tensor, agreement: Agreement) -> None:
    """Adds the tokens that count and whose two sets of experts (tokens, top-k) are the same, whatever the order.

    The counts stay where the routes are: to read them here, layer by layer, would have the CPU wait for the GPU.
    """
    same = (own.sort(dim=-1).values == replayed.sort(dim=-1).values).all(dim=-1)
    agreement.agree = agreement.agree + (same & agreement.counts).sum()
    agreement.total = agreement.total + agreement.counts.sum()


class BeamRouter(Router):
    """The router in Megatron's MoE layer: called with (tokens, hidden) and, for a replay, with the experts to use."""

    expert_bias: Tensor

    def __init__(self, config: Any, pg_collection: Any = None, is_mtp_layer: bool = False) -> None:
        if config.moe_router_fusion:
            raise ValueError(
                "moe_router_fusion: a fused router chooses its experts inside one kernel, so that a replayed choice "
                "would be ignored without a word; leave it off"
            )
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.register_buffer("expert_bias", torch.zeros(self.num_experts, dtype=torch.float32, device=config.device))

    def reset_parameters(self) -> None:
        """Called by Megatron when it creates the weight; its own version would cast it to the activation dtype."""
        self.weight.data = self.weight.data.to(self.config.device)
        if self.config.perform_initialization:
            self.config.init_method(self.weight)
        self.weight.sequence_parallel = self.config.sequence_parallel

    def routing(
        self, logits: Tensor, routes: Tensor | None = None, agreement: Agreement | None = None
    ) -> tuple[Any, Any]:
        """Returns (tokens, experts) the weights, zero where not chosen, and the choice as booleans."""
        config = self.config
        scores = logits.sigmoid()
        if routes is None or agreement is not None:
            own = choose_experts(
                scores.detach(),
                self.expert_bias,
                config.moe_router_num_groups,
                config.moe_router_group_topk,
                config.moe_router_topk,
            )
        if routes is not None and agreement is not None:
            count_agreement(own, routes, agreement)
        experts = own if routes is None else routes
        weights = torch.zeros_like(scores).scatter(1, experts, expert_weights(scores, experts))
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts, True)
        return weights, chosen

    def forward(
        self, hidden: Tensor, routes: Tensor | None = None, agreement: Agreement | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden.view(-1, hidden.size(-1)).float(), self.weight)
        return self.routing(logits, routes, agreement)
