"""vLLM's own Beam on a GPU: an adapter against the same model with the adapter merged into its weights, kind by kind.

The base is BF16, or MXFP8: then the adapter is merged into what the base stands for. And sub-layer by sub-layer against
transformers.
"""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from beam_rl.adapter_stacks import stacked
from beam_rl.bench.moe_lora import Case, model_config
from beam_rl.checkpoint_shapes import checkpoint_shapes
from beam_rl.checksum import SentChecksum
from beam_rl.lora import ALL_TARGETS, Adapter, adapter_modules, adapter_tensors, repeated_tensors
from beam_rl.mxfp8.format import rounded
from beam_rl.mxfp8.scheme import Scheme, scheme_of
from beam_rl.parity.check import SUBLAYER_BOUND
from beam_rl.parity.compare import Side, compare
from beam_rl.parity.record import MARGIN, Records
from beam_rl.parity.reference import Reference
from beam_rl.rollout.engine import Engine
from beam_rl.rollout.launch import EngineSettings
from beam_rl.rollout.sync.link import Link
from beam_rl.rollout.sync.local import LocalSync
from beam_rl.samples import Completion, Request

pytestmark = pytest.mark.gpu

ADAPTER = Adapter(rank=64, alpha=128.0, expert_rank=8, expert_alpha=16.0, targets=ALL_TARGETS)
KINDS = {"attention": ".self_attn.", "dense": ".layers.0.mlp.", "experts": ".mlp.experts."}
PROMPTS, PROMPT_TOKENS = 64, 40
CONFIG = model_config(
    Case(
        hidden=512,
        layers=4,
        heads=8,
        kv_heads=2,
        dense=1024,
        expert=256,
        experts=32,
        top_k=8,
        vocabulary=4096,
        dtype="bf16",
    )
) | {"head_dim": 128}
Tensors = dict[str, Tensor]
Checkpoint = tuple[Path, Tensors]
Firsts = list[list[tuple[int, float]]]  # of each prompt, the most likely tokens and their log-probabilities


def make_checkpoint(folder: Path) -> Tensors:
    """A random Beam in BF16 whose next tokens hang on every projection; the tensors by their HF names."""
    generator = torch.Generator().manual_seed(0)
    weights: Tensors = {}
    for name, shape in sorted(checkpoint_shapes(CONFIG).items()):
        if len(shape) == 1:
            weights[name] = torch.ones(shape) if "norm" in name else torch.zeros(shape)
            continue
        scale = 1.0 if "embed" in name else shape[-1] ** -0.5 * (3 if "lm_head" in name else 1)
        weights[name] = torch.randn(shape, generator=generator) * scale
    kept = {n: w if ".mlp.gate." in n else w.bfloat16() for n, w in weights.items()}  # the router stays FP32
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return kept


def make_adapter(config: dict[str, Any], kind: str) -> Tensors:
    """An adapter that changes only one kind of matrices."""
    generator = torch.Generator().manual_seed(1)
    repeated = repeated_tensors(ADAPTER, config)
    found: Tensors = {}
    for name, shape in adapter_tensors(ADAPTER, config).items():
        if name in repeated:
            continue
        values = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if ".lora_A." in name else 0.05)
        found[name] = (values if ".lora_A." in name or KINDS[kind] in name else 0 * values).bfloat16()
    return found


def merged(weights: Tensors, adapter: Tensors, config: dict[str, Any]) -> Iterable[tuple[str, Tensor]]:
    repeated = repeated_tensors(ADAPTER, config)
    deltas = {
        f"{m.name}.weight": m.scale * adapter[m.b].float() @ adapter[repeated.get(m.a, m.a)].float()
        for m in adapter_modules(ADAPTER, config)
    }
    for name, weight in weights.items():
        yield name, (weight + deltas[name]).to(weight.dtype) if name in deltas else weight


class Served:
    """An engine in this process with a way to its weights."""

    def __init__(self, folder: Path, logs: Path, adapter: Adapter | None, mxfp8: Scheme | None = None) -> None:
        self.engine = Engine(
            EngineSettings(
                model=str(folder), dtype="bf16", max_model_len=256, max_num_seqs=PROMPTS, max_batched_tokens=512,
                kv_cache_gib=0.1, gpu_memory_utilization=0.2, seed=0, routing_replay=True, host="127.0.0.1",
                log_dir=str(logs), name="lora" if adapter else "merged", adapter=adapter, mxfp8=mxfp8,
                extra={"kv_cache_memory_bytes": 2**28},  # vLLM measures no memory then, which others may change meanwhile
            )
        )  # fmt: skip
        self.version = 0

    async def start(self) -> None:
        await self.engine.start()
        link = Link("shm", 2**22, deadline_s=60, checksums=True, host="127.0.0.1")
        self.sync = LocalSync(self.engine, link, torch.device("cpu"))
        await self.sync.join()

    async def load(self, tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        """The checksum of the adapter held afterwards."""
        self.version += 1
        return (await self.sync.load(tensors, self.version))[1]

    async def firsts(self) -> Firsts:
        """Of 5 greedy tokens: decode steps run the kernels for few tokens."""
        generator = torch.Generator().manual_seed(5)
        draw = lambda: torch.randint(3, CONFIG["vocab_size"], (PROMPT_TOKENS,), generator=generator).tolist()  # noqa: E731
        asked = [Request(f"r{i}", draw(), i, 5, 0.0) for i in range(PROMPTS)]
        got = {c.id: c async for c in self.engine.generate(asked)}
        for request in asked:
            routes = got[request.id].routes
            assert routes is not None and routes.shape == (PROMPT_TOKENS + len(got[request.id].token_ids) - 1, 3, 8)
        # All tokens for the test of equal bits; a response may have ended with its first one.
        return [list(zip(got[r.id].token_ids.tolist(), got[r.id].logp.tolist(), strict=True)) for r in asked]


SCHEME = scheme_of(SimpleNamespace(**CONFIG), activations=False)


async def sample_adapters(served: Served) -> dict[str, Firsts]:
    """Of the checkpoint alone and with each kind's adapter."""
    await served.start()
    found = {"none": await served.firsts()}
    for kind in KINDS:
        adapter, watched = make_adapter(CONFIG, kind), SentChecksum(ADAPTER, CONFIG, torch.bfloat16)
        held = await served.load(watched.watch(stacked(adapter.items(), CONFIG)))
        assert held == watched.value()
        found[kind] = await served.firsts()
    slots = {s.module.rpartition(".")[2]: s.a[2] for s in await served.engine.adapter_slots()}
    assert slots["experts"] == 8 and {rank for name, rank in slots.items() if name != "experts"} == {64}
    await served.engine.stop()
    return found


async def sample_merged(served: Served, weights: Tensors) -> dict[str, dict[str, Firsts]]:
    """Of each kind's adapter merged into the weights ("bf16"), into what MXFP8 holds of them ("mxfp8"), and of what MXFP8
    would hold of the first ("rounded")."""
    await served.start()
    found = {"bf16": {"none": await served.firsts()}, "mxfp8": {}, "rounded": {}}
    stands_for = {n: rounded(w) if SCHEME.has(n) else w for n, w in weights.items()}
    for kind in KINDS:
        adapter = make_adapter(CONFIG, kind)
        await served.load(merged(weights, adapter, CONFIG))
        found["bf16"][kind] = await served.firsts()
        await served.load(merged(stands_for, adapter, CONFIG))
        found["mxfp8"][kind] = await served.firsts()
        await served.load((n, rounded(w) if SCHEME.has(n) else w) for n, w in merged(weights, adapter, CONFIG))
        found["rounded"][kind] = await served.firsts()
    await served.engine.stop()
    return found


async def sample_synced(served: Served, weights: Tensors) -> dict[str, Firsts]:
    """Of an MXFP8 engine's checkpoint, and of weights that a sync quantized."""
    await served.start()
    found = {"none": await served.firsts()}
    for kind in KINDS:
        await served.load(SCHEME.quantized(merged(weights, make_adapter(CONFIG, kind), CONFIG)))
        found[kind] = await asyncio.wait_for(served.firsts(), 60)  # it hung: see keep_mxfp8_kernels
    await served.engine.stop()
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("native")
    return folder, make_checkpoint(folder)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native_logs")


@pytest.fixture(scope="module")
def with_adapter(checkpoint: Checkpoint, logs: Path) -> dict[str, Firsts]:
    return asyncio.run(sample_adapters(Served(checkpoint[0], logs, ADAPTER)))


@pytest.fixture(scope="module")
def on_mxfp8(checkpoint: Checkpoint, logs: Path) -> dict[str, Firsts]:
    return asyncio.run(sample_adapters(Served(checkpoint[0], logs, ADAPTER, SCHEME)))


@pytest.fixture(scope="module")
def without(checkpoint: Checkpoint, logs: Path) -> dict[str, dict[str, Firsts]]:
    return asyncio.run(sample_merged(Served(checkpoint[0], logs, None), checkpoint[1]))


@pytest.fixture(scope="module")
def synced(checkpoint: Checkpoint, logs: Path) -> dict[str, Firsts]:
    return asyncio.run(sample_synced(Served(checkpoint[0], logs, None, SCHEME), checkpoint[1]))


def agreement(one: Firsts, two: Firsts) -> tuple[float, float]:
    """Share of first tokens that are the same, and the mean |Δlogp| of those."""
    firsts = [(a[0], b[0]) for a, b in zip(one, two, strict=True)]
    same = [abs(a[1] - b[1]) for a, b in firsts if a[0] == b[0]]
    return len(same) / PROMPTS, sum(same) / max(1, len(same))


def test_without_an_adapter_the_native_model_is_as_it_was(
    with_adapter: dict[str, Firsts], without: dict[str, dict[str, Firsts]]
) -> None:
    assert with_adapter["none"] == without["bf16"]["none"]


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp8_engine_that_is_synced_samples_as_bf16_of_the_same_values(
    kind: str, synced: dict[str, Firsts], without: dict[str, dict[str, Firsts]]
) -> None:
    share, gap = agreement(synced[kind], without["rounded"][kind])
    before, _ = agreement(synced[kind], synced["none"])
    print(f"{kind} synced: the same first tokens as in BF16 {share:.0%}, |Δlogp| {gap:.3f}; before {before:.0%}")
    assert share > 0.75 and gap < 0.25 and before < share - 0.2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", ["bf16", "mxfp8"])
def test_adapter_of_a_kind_is_the_adapter_merged(
    kind: str, base: str, without: dict[str, dict[str, Firsts]], request: pytest.FixtureRequest
) -> None:
    adapted: dict[str, Firsts] = request.getfixturevalue("with_adapter" if base == "bf16" else "on_mxfp8")
    share, gap = agreement(adapted[kind], without[base][kind])
    bare, _ = agreement(adapted[kind], adapted["none"])
    print(
        f"{kind} on {base}: the same first tokens with it merged {share:.0%}, |Δlogp| {gap:.3f}; without it {bare:.0%}"
    )
    # BF16 twice: B·A is rounded into the weights of one, and routes flip; Marlin and Triton sum in other orders too.
    assert share > (0.85 if base == "bf16" else 0.75) and gap < 0.25
    assert bare < share - 0.2


# --- sub-layer by sub-layer ---------------------------------------------------------------------------------


async def look_into(folder: Path, logs: Path) -> tuple[list[int], list[Completion], list[Records]]:
    """The tokens of a response to one prompt, two samplings of it, and what was seen between them: all, and the end."""
    served = Served(folder, logs, None)
    await served.start()
    prompt = torch.randint(
        3, CONFIG["vocab_size"], (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(6)
    ).tolist()

    async def sample() -> Completion:
        (done,) = [c async for c in served.engine.generate([Request("r", prompt, 0, 20, 0.0)])]
        await served.engine.forget_prefixes()
        return done

    first = await sample()
    tokens = [*prompt, *first.token_ids.tolist()]
    seen = [await served.engine.probe(tokens, first.routes, 1.0, sublayers) for sublayers in (True, False)]
    again = await sample()
    await served.engine.stop()
    return tokens, [first, again], seen


def test_native_model_computes_what_transformers_does_in_every_sublayer_that_it_shows(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are short enough for CUDA graphs, in which nothing would be seen; samplings before and after use them."""
    folder, _ = checkpoint
    tokens, (first, again), (seen, end) = asyncio.run(look_into(folder, tmp_path))
    assert first.token_ids.tolist() == again.token_ids.tolist()
    np.testing.assert_allclose(again.logp, first.logp, atol=1e-3)
    assert set(end) == {(None, "log_probabilities")}
    np.testing.assert_allclose(end[None, "log_probabilities"], seen[None, "log_probabilities"], atol=1e-3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # other tests fork this process into engines
    assert first.routes is not None
    expected = Reference(str(folder), "bf16", rounded_logits=True, temperature=1.0).probe(
        np.array(tokens), first.routes
    )
    hidden = ["k", "post_attention_norm", "post_mlp_norm"]
    assert set(seen) == {place for place in expected if place[1] not in (*hidden, MARGIN)}
    sides = {n: Side(r, r[None, "log_probabilities"][:, 0]) for n, r in (("reference", expected), ("engine", seen))}
    found = compare(sides, replayed=True, sublayer_bound=SUBLAYER_BOUND["bf16"], logprob_mean_bound=0.1)
    for place, error in found.errors["engine_reference"].items():
        print(place, f"{error:.1e}")
    assert found.within_bounds, found.first_departure
    assert found.unseen == {"engine": hidden} and found.route_agreement is not None and found.route_agreement > 0.8
