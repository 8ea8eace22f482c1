"""The plan's activations are what a real update has alive at most, op by op and dtype by dtype."""

import megatron_tiny as tiny
import pytest
from live_bytes import LivePeak

from beam_rl.plan import activations


def planned(precision: str, recompute: str, tokens: int) -> float:
    c, narrow = tiny.config(), precision == "bf16"
    sizes = activations.Sizes(
        hidden=c["hidden_size"],
        queries=c["num_attention_heads"] * c["head_dim"],
        keys=c["num_key_value_heads"] * c["head_dim"],
        dense=c["intermediate_size"],
        expert=c["moe_intermediate_size"],
        experts=c["num_experts"],
        top_k=c["num_experts_per_tok"],
        vocabulary=c["vocab_size"],
        value_bytes=2 if narrow else 4,
        fused=False,
    )
    there = activations.Tokens(tokens, tokens, tokens * sizes.top_k, tokens)
    stage = activations.Stage(dense=3, sparse=4, in_flight=1, last=True)
    return activations.peak(
        activations.beam_parts(sizes, there),
        sizes,
        there,
        stage,
        recompute,
        1024,
        head_trainable=True,
        workspace_bytes=14 if narrow else 8,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_of_an_update_are_as_planned(precision: str, recompute: str) -> None:
    trainer = tiny.trainer(precision=precision, recompute=recompute)
    for lengths in ([100] * 10, [50] * 40):
        batch = [tiny.micro_batch(lengths)]
        trainer.update(batch, tiny.squared_objective, lr=1e-4)  # what is made once
        with LivePeak() as alive:
            trainer.update(batch, tiny.squared_objective, lr=1e-4)
        assert planned(precision, recompute, sum(lengths)) == pytest.approx(alive.peak, rel=0.06)
