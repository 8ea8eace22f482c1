"""A run in MXFP8: the engine multiplies with the trainer's bits, in training and from what is exported."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import runs
import torch
from live_run import TINY, LiveRun, live_cluster, on
from rollout_fixtures import settings
from safetensors.torch import load_file
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16

from beam_rl.checkpoint_shapes import checkpoint_shapes
from beam_rl.errors import InputError
from beam_rl.inputs import scheme_for
from beam_rl.mxfp8.format import quantize
from beam_rl.mxfp8.restore import Restored
from beam_rl.mxfp8.scheme import SCALE, Scheme, scheme_of
from beam_rl.recipe.load import RecipeError, load
from beam_rl.rollout.engine import Engine
from beam_rl.samples import Request

STEPS, KEPT = 10, 1  # twenty updates; a layer at the end stays BF16
GAP = 0.015  # nats, mean |Δlogp| of a step with replay


@pytest.fixture(scope="module")
def live(ray_here: str, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("mxfp8")
    model = [f"model.path={tiny_folder}", f"cluster.address={ray_here}"]
    model += [f"data.{part}.path={tiny_folder / part}.jsonl" for part in ("train", "eval")]
    overrides = [*model, "trainer.precision=mxfp8", f"trainer.mxfp8.keep_last_layers={KEPT}"]
    with live_cluster(folder / "logs", *overrides) as cluster, on(cluster, folder / "run", *overrides) as run:
        for _ in range(STEPS):
            run.loop.step()
        yield run


@pytest.fixture(scope="module")
def exported(live: LiveRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy in MXFP8, after the last sync."""
    folder = tmp_path_factory.mktemp("exports") / "mxfp8"
    live.loop.policy.export(folder, "mxfp8")
    return folder


@pytest.fixture(scope="module")
def scheme(exported: Path) -> Scheme:
    return scheme_of(config(exported), keep_last_layers=KEPT)


def config(folder: Path) -> Any:
    return SimpleNamespace(**json.loads((folder / "config.json").read_text()))


def requests(count: int) -> list[Request]:
    return [Request(f"{i}", [1, 5 + i, 9, 17], seed=i, max_tokens=10, temperature=1.0) for i in range(count)]


def sample(actor: Any) -> dict[str, Any]:
    stream = actor.generate.options(num_returns="streaming").remote(requests(8))
    return {c.id: c for c in (ray.get(ref, timeout=60) for ref in stream)}


def test_trainer_and_engine_agree_at_every_step(live: LiveRun) -> None:
    gaps = [found["parity/abs_logprob_diff_mean"] for found in runs.metrics(live.loop.run.folder)[1:]]
    assert len(gaps) == STEPS and max(gaps) < GAP


def test_the_engine_holds_the_trainers_bits_after_twenty_updates(live: LiveRun, exported: Path, scheme: Scheme) -> None:
    held, seen = load_file(exported / "model.safetensors"), 0
    for name in checkpoint_shapes(vars(config(exported))):
        theirs = torch.from_numpy(live.weights_of(0, name).copy())
        ours = held[name]
        if name + SCALE in held:
            assert ours.dtype == torch.float8_e4m3fn and scheme.has(name)
            ours, seen = dequant_mxfp8_to_bf16(ours, held[name + SCALE]), seen + 1
        bits = ours if ours.dtype == torch.float32 else ours.bfloat16().view(torch.uint16)
        assert torch.equal(theirs, bits.to(theirs.dtype)), name
    assert seen == sum(scheme.has(name) for name in checkpoint_shapes(vars(config(exported)))) > 100
    assert held["model.layers.3.mlp.gate.weight"].dtype == torch.float32


def test_a_sync_is_payload_and_scales(live: LiveRun, exported: Path) -> None:
    sent = runs.metrics(live.loop.run.folder)[-1]["sync/bytes"]
    held = load_file(exported / "model.safetensors")
    assert sent == sum(tensor.nbytes for tensor in held.values())
    quantized = [(t, held[name + SCALE]) for name, t in held.items() if name + SCALE in held]
    assert sum(t.nbytes + s.nbytes for t, s in quantized) == sum(2 * t.numel() for t, _ in quantized) * 33 // 64


def test_an_engine_that_starts_from_the_export_is_the_runs_engine(
    live: LiveRun, exported: Path, scheme: Scheme, tmp_path: Path
) -> None:
    quantization = json.loads((exported / "config.json").read_text())["quantization_config"]
    assert quantization["quant_algo"] == "MXFP8" and f"model.layers.{scheme.num_layers - 1}.*" in quantization["ignore"]
    fresh = ray.remote(Engine).remote(settings(exported, "bf16", "exported", tmp_path, mxfp8=scheme, max_model_len=64))
    ray.get(fresh.start.remote(), timeout=300)
    try:
        theirs, ours = sample(live.loop.engines.slots[0].actor), sample(fresh)
        assert theirs.keys() == ours.keys()
        for name, completion in ours.items():
            assert completion.token_ids.tolist() == theirs[name].token_ids.tolist()
            assert completion.logp.tolist() == theirs[name].logp.tolist()
    finally:
        ray.get(fresh.stop.remote(), timeout=60)
        ray.kill(fresh)


def test_a_checkpoint_in_fp32_is_rounded_as_the_trainer_holds_it() -> None:
    scheme, weight = Scheme(num_layers=1), torch.randn(64, 64)
    names = ["model.layers.0.mlp.up_proj.weight"]
    wide, narrow = (dict(scheme.quantized([(names[0], w)])) for w in (weight, weight.bfloat16()))
    assert all(torch.equal(wide[name].view(torch.uint8), narrow[name].view(torch.uint8)) for name in narrow)
    assert not torch.equal(quantize(weight).payload.view(torch.uint8), narrow[names[0]].view(torch.uint8))


def test_scales_may_come_in_a_later_stream_than_their_payload() -> None:
    scheme, weight = Scheme(num_layers=1), torch.randn(8, 64).bfloat16()
    stream = list(scheme.quantized([("model.layers.0.mlp.up_proj.weight", weight), ("lm_head.weight", weight)]))
    assert list(scheme.quantized(stream)) == stream  # what is MXFP8 stays
    (direct, _), restored = Restored(scheme).tensors(iter([("model.layers.0.mlp.up_proj.weight", weight)] * 2)), []
    receiver = Restored(scheme)
    for one in stream:
        restored += receiver.tensors([one])
    assert [name for name, _ in restored] == ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    assert torch.equal(restored[0][1], direct[1]) and not torch.equal(restored[0][1], weight)
    assert [name for name, _ in stream] == list(scheme.names(name for name, _ in restored))


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        (["rollout.precision=mxfp8"], "rollout.precision = mxfp8: with trainer.precision = bf16 or mxfp8, not fp32"),
        (["trainer.mxfp8.activations=false"], "only with trainer.precision or rollout.precision = mxfp8"),
    ],
)
def test_what_cannot_be_mxfp8_is_refused(overrides: list[str], refusal: str) -> None:
    with pytest.raises(RecipeError, match=refusal):
        load(TINY, overrides)


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        (
            ["trainer.precision=mxfp8", "rollout.parallel.tp=2"],
            "rollout.precision = mxfp8: .* moe_intermediate_size = 32",
        ),
        (
            ["trainer.precision=mxfp8", "trainer.parallel.etp=2"],
            "trainer.precision = mxfp8: .* moe_intermediate_size = 32",
        ),
        (["trainer.precision=bf16", "rollout.precision=mxfp8", "trainer.mxfp8.keep_last_layers=99"], "has 7 layers"),
    ],
)
def test_a_model_that_mxfp8_does_not_divide_is_refused_before_anything_starts(
    overrides: list[str], refusal: str, tiny_folder: Path
) -> None:
    with pytest.raises(InputError, match=refusal):
        scheme_for(load(TINY, overrides), tiny_folder)
