"""`beam-rl bench replay`: real engines of a few layers."""

from dataclasses import replace

import pytest
import torch

from beam_rl.bench import measure
from beam_rl.bench.moe_lora import SMALL
from beam_rl.bench.replay import run

TINY = replace(SMALL, hidden=64, dense=128, expert=32, experts=16, top_k=4, vocabulary=256, tokens=8, concurrency=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU")
def test_routes_are_a_byte_an_expert_a_layer_and_absent_without_replay() -> None:
    without, with_routes = measure.in_fresh_process(run, TINY)
    assert without.tokens_s > 0 and without.route_bytes == 0
    assert with_routes.tokens_s > 0 and with_routes.route_bytes == (TINY.layers - 1) * TINY.top_k
