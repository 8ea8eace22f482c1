"""Parity looks into vLLM's own Beam, whose kernels fuse sub-layers, and tells what they hide."""

import io
from typing import Any

import megatron_tiny as tiny
import numpy as np
import pytest
import rich.console
import torch
from native_beam import NativeBeam, Runner
from torch import Tensor

from beam_rl.megatron.probe import replaced
from beam_rl.parity import table
from beam_rl.parity.compare import Comparison, Side, compare
from beam_rl.parity.record import AFTER, BEFORE, LAYER, MARGIN, Records
from beam_rl.parity.reference import Reference
from beam_rl.rollout.probe import Probe

TOKENS, LAYERS, FIRST_SPARSE = 40, 7, 3
HIDDEN = ["k", "post_attention_norm", "post_mlp_norm"]
IDS = torch.tensor(np.random.default_rng(0).integers(3, tiny.VOCAB, TOKENS))
ROUTES = np.array(
    [[np.random.default_rng(i).permutation(16)[:4] for i in (t, -t % 97, t + 7, 3 * t)] for t in range(TOKENS - 1)]
)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(str(tiny.checkpoint()), "fp32", rounded_logits=True, temperature=0.7)


def native(**layout: bool) -> NativeBeam:
    return NativeBeam(tiny.reference_model(), **layout)


def looked_into(model: NativeBeam, routes: Tensor | None = None, sublayers: bool = True) -> Records:
    runner = Runner(model)
    probe = Probe(runner, routes, sublayers)
    runner.run(IDS[:-1])
    records = probe.finish(IDS[1:], 0.7).records()
    assert runner._graphs_captured
    return records


def judge(reference: Records, **others: Records) -> Comparison:
    sides = {
        name: Side(r, r[None, "log_probabilities"][:, 0]) for name, r in {"reference": reference, **others}.items()
    }
    return compare(sides, replayed=True, sublayer_bound=1e-5, logprob_mean_bound=1e-5)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("fuse_kv_insert", [True, False])
@pytest.mark.parametrize("routes", [None, ROUTES], ids=["free", "replayed"])
def test_what_the_native_model_shows_is_what_transformers_computes(
    reference: Reference, merged: bool, fuse_kv_insert: bool, routes: Any
) -> None:
    told = None if routes is None else torch.tensor(routes)
    seen = looked_into(native(merged=merged, fuse_kv_insert=fuse_kv_insert), told)
    expected = reference.probe(IDS.numpy(), routes)
    hidden = [name for name in HIDDEN if name != "k" or fuse_kv_insert]
    assert set(seen) == {p for p in expected if p[1] not in (*hidden, MARGIN)}
    found = judge(expected, engine=seen)
    assert found.within_bounds and found.unseen == {"engine": hidden} and found.route_agreement == 1
    assert max(found.errors["engine_reference"].values()) < 1e-5
    assert {name for _, name in seen} == {*BEFORE, *LAYER, *AFTER} - set(hidden)


def test_log_probabilities_alone_take_no_hook_in_a_layer(reference: Reference) -> None:
    model = native()
    runner = Runner(model)
    probe = Probe(runner, None, sublayers=False)
    assert [n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks] == ["model"]
    assert all("select_experts" not in vars(layer.mlp.experts.router) for layer in model.model.layers[FIRST_SPARSE:])
    probe.stop()
    for routes in (None, ROUTES):
        alone = looked_into(model, None if routes is None else torch.tensor(routes), sublayers=False)
        assert set(alone) == {(None, "log_probabilities")}
        expected = reference.probe(IDS.numpy(), routes)[None, "log_probabilities"]
        np.testing.assert_allclose(alone[None, "log_probabilities"], expected, atol=1e-5)


def state(model: NativeBeam) -> list[Any]:
    hooks = [(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()]
    layers = model.model.layers
    return [hooks, [i.attention_boundary for i in layers], [vars(i.mlp.experts.router) for i in layers[FIRST_SPARSE:]]]


def test_a_probe_leaves_the_native_model_as_it_was() -> None:
    model = native()
    before = state(model)
    looked_into(model)
    assert state(model) == before


def test_a_model_of_another_shape_is_refused_and_left_alone() -> None:
    model = native()
    model.model.layers[0].forward = lambda positions, hidden_states: hidden_states
    before, runner = state(model), Runner(model)
    with pytest.raises(RuntimeError, match=r"its Beam is not the one of 0\.33"):
        Probe(runner, None)
    assert state(model) == before and runner._graphs_captured


def test_graphs_that_can_not_be_stopped_are_an_error() -> None:
    runner = Runner(native())
    del runner.cudagraph_manager
    with pytest.raises(RuntimeError, match="how to stop the CUDA graphs of Runner"):
        Probe(runner, None)


def test_steps_that_a_graph_ran_are_an_error_and_no_empty_table() -> None:
    runner = Runner(native())
    probe = Probe(runner, None)
    runner._graphs_captured = True
    runner.run(IDS[:-1])
    with pytest.raises(RuntimeError, match=f"ran 0 tokens of a sequence of {TOKENS - 1}"):
        probe.finish(IDS[1:], 1.0)


def test_kernels_that_choose_experts_hide_routers_and_can_not_replay(reference: Reference) -> None:
    seen = looked_into(native(monolithic=True))
    found = judge(reference.probe(IDS.numpy(), None), engine=seen)
    assert found.within_bounds and found.route_agreement is None
    assert found.unseen["engine"] == [name for name in LAYER if name in {*HIDDEN, "router_logits", "experts"}]
    with pytest.raises(RuntimeError, match="4 of 4 MoE layers can't be told which experts to use"):
        looked_into(native(monolithic=True), torch.tensor(ROUTES))


def test_a_place_that_some_steps_hide_is_left_out(reference: Reference) -> None:
    model = native()
    attention = model.model.layers[2].self_attn
    probe = Probe(Runner(model), None)
    probe.recorder.add(2, "gate", torch.zeros(5, 1))  # of a step before, and the next calls the weight past its module
    unwatched = type(attention.qkv_gate_proj)(attention.qkv_gate_proj.weight)
    with torch.inference_mode(), replaced(attention, "qkv_gate_proj", unwatched):
        model(IDS[:-1], torch.arange(TOKENS - 1))
    found = judge(reference.probe(IDS.numpy(), None), engine=probe.finish(IDS[1:], 0.7).records())
    assert (2, "gate") not in found.errors["engine_reference"] and (3, "gate") in found.errors["engine_reference"]
    assert found.unseen["engine"] == [name for name in LAYER if name in {*HIDDEN, "v", "gate"}]
    assert found.within_bounds


def test_a_fault_in_what_is_hidden_is_named_where_it_comes_out(reference: Reference) -> None:
    expected, model = reference.probe(IDS.numpy(), None), native()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_norm.weight.mul_(1.5)
    faulty = looked_into(model)
    found = judge(expected, trainer=expected, engine=faulty)
    first = found.first_departure
    assert first is not None and (first.pair, first.layer, first.sublayer) == ("engine_reference", 1, "attention")
    assert found.alone == "engine"


def test_a_side_is_alone_although_another_does_not_show_the_place(reference: Reference) -> None:
    """The trainer departs at K from the reference, and where K comes out from the engine."""
    expected, seen = reference.probe(IDS.numpy(), None), looked_into(native())
    wrong = expected | {(1, n): expected[1, n] * np.float32(1.5) for n in ("k", "attention")}
    found = judge(expected, trainer=wrong, engine=seen)
    first = found.first_departure
    assert first is not None and (first.pair, first.layer, first.sublayer) == ("trainer_reference", 1, "k")
    assert found.alone == "trainer"
    text = io.StringIO()
    table.show(found, rich.console.Console(file=text, width=100, highlight=False))
    lines = text.getvalue().splitlines()
    assert "not shown by the engine, hence not compared: k, post_attention_norm, post_mlp_norm" in lines
    assert next(line for line in lines if line.startswith("k ")).split() == ["k", "5.0e-01", "*", "–", "–"]
    assert table.verdict(found).endswith("trainer differs there from both others")
    assert found.record()["unseen"] == {"engine": HIDDEN}
