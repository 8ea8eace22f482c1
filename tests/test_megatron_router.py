"""The router chooses as Beam does, replays what it is told, and is trained in FP32."""

from typing import Any

import megatron_tiny as tiny
import numpy as np
import pytest
import torch
from transformers.models.beam import BeamConfig
from transformers.models.beam.modeling_beam import BeamTopKRouter

from beam_rl.megatron.packing import Agreement
from beam_rl.megatron.router import choose_experts, count_agreement, expert_weights, invalid_rows


@pytest.mark.parametrize(("top_k", "groups", "top_groups"), [(4, 4, 2), (6, 4, 3), (3, 8, 4)])
def test_choice_and_weights_are_those_of_transformers(top_k: int, groups: int, top_groups: int) -> None:
    config = BeamConfig(
        hidden_size=32, num_experts=24, num_experts_per_tok=top_k, n_group=groups, topk_group=top_groups
    )
    router, generator = BeamTopKRouter(config), torch.Generator().manual_seed(0)
    x = torch.randn(200, 32, generator=generator)
    with torch.no_grad():
        router.weight.normal_(generator=generator)
        router.e_score_correction_bias.normal_(generator=generator)
        _, weights, chosen = router(x)
        scores = (x @ router.weight.T).sigmoid()
        ours = choose_experts(scores, router.e_score_correction_bias, groups, top_groups, top_k)
    assert torch.equal(ours.sort().values, chosen.sort().values)
    torch.testing.assert_close(expert_weights(scores, chosen), weights)


def test_replayed_experts_get_weights_with_a_gradient_from_the_full_scores() -> None:
    scores = torch.rand(5, 8, requires_grad=True)
    worst = scores.detach().argsort(dim=-1)[:, :2]  # experts that the router itself would never take
    expert_weights(scores, worst)[:, 0].sum().backward()
    assert scores.grad is not None
    assert (scores.grad.gather(1, worst) != 0).all()
    assert scores.grad.count_nonzero() == 10


def test_agreement_counts_sets_not_orders() -> None:
    agreement = Agreement(counts=torch.tensor([True, True, False]))
    count_agreement(torch.tensor([[3, 1], [2, 0], [3, 1]]), torch.tensor([[1, 3], [2, 1], [3, 1]]), agreement)
    assert (agreement.agree, agreement.total) == (1, 2)
    count_agreement(torch.tensor([[3, 1]] * 3), torch.tensor([[3, 1]] * 3), agreement)
    assert (agreement.agree, agreement.total) == (3, 4)


def test_rows_that_no_router_can_have_chosen_are_found() -> None:
    routes = np.array(
        [[[0, 1], [2, 3]], [[0, 0], [2, 3]], [[0, 1], [3, 3]], [[0, 1], [2, 4]], [[1, 0], [3, 2]]], np.uint8
    )
    assert invalid_rows(routes, num_experts=4).tolist() == [False, True, True, True, False]
    assert invalid_rows(np.zeros((2, 3, 4), np.uint16), num_experts=256).all()
    assert not invalid_rows(np.arange(256, dtype=np.uint8)[None, None], num_experts=256).any()


def test_replay_takes_effect_and_agreement_tells_how_much_it_changed() -> None:
    trainer = tiny.trainer()
    free, replayed = tiny.micro_batch([20, 9], routes=False), tiny.micro_batch([20, 9])
    a, b = trainer.score([free])[0], trainer.score([replayed])[0]
    assert (a.routes_agree, a.routes_total) == (0, 0)
    assert b.routes_total == 29 * tiny.MOE_LAYERS
    assert b.routes_agree < 0.1 * b.routes_total  # the routes are random
    assert np.abs(a.logp - b.logp).max() > 1e-3


def test_replaying_the_routers_own_choice_changes_nothing() -> None:
    trainer, batch = tiny.trainer(), tiny.micro_batch([20, 9], routes=False)
    chosen: list[torch.Tensor] = []
    for layer in trainer.model.decoder.layers:
        if layer.is_moe_layer:
            layer.mlp.router.register_forward_hook(lambda m, i, out: chosen.append(out[1]))
    free = trainer.score([batch])[0]
    routes = torch.stack([c.float().topk(tiny.TOP_K, dim=-1).indices for c in chosen], dim=1).numpy()
    again = trainer.score([tiny.replace(batch, routes=routes.astype(np.uint8))])[0]
    assert again.routes_agree == again.routes_total == 29 * tiny.MOE_LAYERS
    np.testing.assert_allclose(again.logp, free.logp, rtol=0, atol=2e-6)  # the weights' sum has another order


def test_routes_of_another_shape_are_refused() -> None:
    batch = tiny.micro_batch([6])
    assert batch.routes is not None
    with pytest.raises(ValueError, match=r"routes of shape \(6, 3, 4\), but this rank needs \(6, 4, 4\)"):
        tiny.trainer().score([tiny.replace(batch, routes=batch.routes[:, 1:])])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_router_is_trained_in_fp32_and_its_correction_bias_is_not(precision: str) -> None:
    trainer = tiny.trainer(precision=precision)
    routers = [layer.mlp.router for layer in trainer.model.decoder.layers if layer.is_moe_layer]
    before = [(r.weight.detach().clone(), r.expert_bias.clone()) for r in routers]
    metrics = trainer.update([tiny.micro_batch([30, 12])], tiny.squared_objective, lr=1e-6)
    assert metrics["optim/router_grad_norm"] > 0
    for router, (weight, bias) in zip(routers, before, strict=True):
        assert router.weight.dtype == router.expert_bias.dtype == torch.float32
        assert (router.weight != weight).float().mean() > 0.9  # steps of 1e-6: BF16 could not hold them
        assert torch.equal(router.expert_bias, bias)


def recompute_all(trainer: Any) -> None:
    trainer.config.recompute_granularity = "full"
    trainer.config.recompute_method, trainer.config.recompute_num_layers = "uniform", 1


def recompute_experts(trainer: Any) -> None:
    for layer in trainer.model.decoder.layers:
        layer.mlp.moe_layer_recompute = True


@pytest.mark.parametrize("recompute", [recompute_all, recompute_experts])
def test_a_recomputed_layer_replays_its_own_micro_batch(recompute: Any) -> None:
    """Both micro-batches run forward before either runs backward, as in a pipeline."""

    def gradients(trainer: Any) -> list[torch.Tensor]:
        trainer.model.train()
        batches = [tiny.micro_batch([20, 7], seed=1), tiny.micro_batch([13], seed=5)]
        packs = [trainer._pack(batch, None) for batch in batches]
        losses = [
            trainer._loss(trainer._hidden(trainer.ddp[0], batch, pack), batch, pack, tiny.squared_objective)[0]
            for batch, pack in zip(batches, packs, strict=True)
        ]
        for loss in losses:
            loss.backward()
        return [p.main_grad.clone() for p in trainer.model.parameters()]

    expected = gradients(tiny.trainer())
    trainer = tiny.trainer()
    recompute(trainer)
    for ours, theirs in zip(gradients(trainer), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
