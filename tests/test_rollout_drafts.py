"""Speculative decoding and vLLM's own arguments in a recipe, on a real CPU engine that drafts by n-grams."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from rollout_fixtures import VOCABULARY, Engines, Reference, RunningEngine, settings
from test_rollout_engine import assert_agrees

from beam_rl.engines import Engines as AllEngines
from beam_rl.engines import Slot
from beam_rl.errors import InputError
from beam_rl.loop import StepError, draft_metrics
from beam_rl.recipe.load import load
from beam_rl.recipe.tree import Speculative
from beam_rl.rollout.engine import Engine
from beam_rl.samples import Completion, Request
from beam_rl.seats import Seat
from beam_rl.tiny.checkpoint import tiny_tokenizer

pytest_plugins = ["rollout_fixtures"]

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
NGRAM = Speculative(tokens=3, options={"prompt_lookup_min": 1, "prompt_lookup_max": 3})
PATTERN = [7, 9, 21, 7, 9, 22, 7, 9]  # so that 7 and 9 are drafted after what they followed before


@pytest.fixture(scope="module")
def drafting(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> RunningEngine:
    """On the checkpoint of `engines.fp32`. Also with an argument that the recipe has no key for."""
    where = engines.fp32.checkpoint
    made = settings(where, "fp32", "ngram", tmp_path_factory.mktemp("ngram"), speculative=NGRAM)
    made = replace(made, tokenizer=engines.fp32.tokenizer)
    actor = ray.remote(Engine).remote(made)
    return RunningEngine(actor, ray.get(actor.start.remote(), timeout=300), where)


def asked(count: int, response: int, temperature: float, seed: int) -> list[Request]:
    """Prompts that repeat themselves, each with others in between."""
    rng = np.random.default_rng(seed)
    prompts = [[*rng.integers(3, VOCABULARY, 3).tolist(), *PATTERN] for _ in range(count)]
    return [Request(f"{seed}-{i}", p, 1000 * seed + i, response, temperature) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logp_and_routes_are_those_of_transformers(
    drafting: RunningEngine, references: dict[str, Reference], temperature: float
) -> None:
    """Of drafted tokens that were taken and of those that replaced one; what was refused leaves no route behind."""
    before = drafting.call("counters")
    requests = asked(48, 16, temperature, seed=int(10 * temperature))
    assert_agrees(references["old"], requests, drafting.sample(requests), tolerance=2e-5)  # one division more
    after = drafting.call("counters")
    drafted, taken = after.drafted_tokens - before.drafted_tokens, after.accepted_tokens - before.accepted_tokens
    assert drafted > 48 and 0 < taken < drafted and after.routes_held == 0


def test_a_stop_string_is_the_end_whatever_was_drafted(
    drafting: RunningEngine, references: dict[str, Reference]
) -> None:
    decode, requests = tiny_tokenizer().decode, asked(24, 40, 0.3, seed=3)  # cold, so that it repeats itself
    free, before = drafting.sample(requests), drafting.call("counters")
    stops = {r.id: decode(free[r.id].token_ids[20:22]) for r in requests if len(free[r.id].token_ids) > 24}
    stopping = [replace(r, stop_strings=(stops[r.id],)) for r in requests if r.id in stops]
    got, after = drafting.sample(stopping), drafting.call("counters")
    assert after.accepted_tokens - before.accepted_tokens > 8 and after.routes_held == 0
    assert_agrees(references["old"], stopping, got, tolerance=1e-4)  # a log-probability of logits divided by 0.3
    ended = {
        name: done for name, done in got.items() if done.ended_by
    }  # others were drafted otherwise, and went elsewhere
    assert len(ended) > 12
    for name, done in ended.items():
        assert stops[name] in decode(done.token_ids) and stops[name] not in decode(done.token_ids[:-1])


def shares(got: dict[str, Completion], length: int) -> np.ndarray:
    """(length, vocabulary) how often each token came at each place, among all responses."""
    counts = np.zeros((length, VOCABULARY))
    for completion in got.values():
        for place, token in enumerate(completion.token_ids):
            counts[place, token] += 1
    return counts / len(got)


def test_samples_are_distributed_as_without_drafts(drafting: RunningEngine, engines: Engines) -> None:
    count, length = 400, 6
    prompt = [5, 30, 41, *PATTERN]
    with_drafts, without = (
        shares(engine.sample([Request(f"{name}{i}", prompt, base + i, length, 0.7) for i in range(count)]), length)
        for engine, name, base in ((drafting, "d", 50_000), (engines.fp32, "p", 90_000))
    )
    pooled = (with_drafts + without) / 2
    spread = np.sqrt(2 * pooled * (1 - pooled) / count)
    sure = pooled * count > 8  # else the difference is not nearly normal
    assert sure[1:].sum() > 20
    assert (np.abs(with_drafts - without)[sure] / spread[sure]).max() < 5


def test_drafts_of_an_evaluation_are_no_steps(drafting: RunningEngine, tmp_path: Path) -> None:
    playing = AllEngines(load(TINY, ["rollout.speculative={tokens: 3}"]), tmp_path, tmp_path)
    playing.slots = [Slot(0, Seat(), drafting.actor, None, "serving")]
    threading.Thread(target=playing._loop.run_forever, daemon=True).start()
    playing.take_drafts()
    before = drafting.call("counters").drafted_tokens
    playing.generate([asked(8, 12, 0.7, seed=4)])
    of_step = drafting.call("counters").drafted_tokens - before
    with playing.drafts_apart():
        playing.generate([asked(8, 12, 0.7, seed=5)])
    assert playing.take_drafts()[0] == of_step > 0 and playing.take_drafts() == (0, 0)
    playing._loop.call_soon_threadsafe(playing._loop.stop)


def test_drafts_that_never_came_end_the_step() -> None:
    assert draft_metrics(10, 4, 1) == {"rollout/drafted": 10, "rollout/draft_acceptance": 0.4}
    with pytest.raises(StepError, match=r"step 1: rollout\.speculative is on, and the engines drafted not one token"):
        draft_metrics(0, 0, 1)
    assert draft_metrics(0, 0, 1, lost=True) == {"rollout/drafted": 0}


@pytest.mark.parametrize(
    ("key", "refusal"),
    [
        (
            "rollout.engine_args={max_num_seqs: 4}",
            "rollout.engine_args.max_num_seqs: the recipe has rollout.max_num_seqs",
        ),
        ("rollout.engine_args={speculative_config: {}}", "the recipe has rollout.speculative for it"),
        ("rollout.speculative={model: drafter}", "the method ngram has no drafter; name another method"),
        ("rollout.speculative={tokens: 0}", r"rollout\.speculative\.tokens"),
    ],
)
def test_what_the_recipe_can_say_otherwise_is_refused(key: str, refusal: str) -> None:
    with pytest.raises(InputError, match=refusal):
        load(TINY, [key])


ASKED = {
    "misspelt": {"extra": {"kv_cache_dtyp": "fp8"}},
    "taken": {"extra": {"load_format": "dummy"}},
    "passed on": {"extra": {"enable_prefix_caching": False}},
    "drafts": {"speculative": NGRAM.model_dump()},
}


@pytest.fixture(scope="module")
def arguments() -> dict[str, Any]:
    """What vLLM would be started with, or why not; in another process, since Megatron's tests don't live beside vLLM."""
    code = (
        "import json, sys; from pathlib import Path; from rollout_fixtures import settings\n"
        "from beam_rl.recipe.tree import Speculative; from beam_rl.rollout.launch import engine_args\n"
        "found = {}\n"
        "for name, asked in json.loads(sys.argv[1]).items():\n"
        "    drafts = {'speculative': Speculative(**asked['speculative'])} if 'speculative' in asked else asked\n"
        "    made = settings(Path('model'), 'fp32', 'engine', Path('logs'), **drafts)\n"
        "    try: found[name] = {k: engine_args(made).get(k) for k in ('enable_prefix_caching', 'speculative_config')}\n"
        "    except Exception as error: found[name] = f'{type(error).__name__}: {error}'\n"
        "print(json.dumps(found))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(ASKED)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_argument_that_vllm_lacks_or_that_is_taken_is_refused(arguments: dict[str, Any]) -> None:
    start = "InputError: rollout.engine_args."
    misspelt, taken = arguments["misspelt"], arguments["taken"]
    assert misspelt.startswith(f"{start}kv_cache_dtyp: vllm") and "did you mean kv_cache_dtype" in misspelt
    assert taken == f"{start}load_format: this is set for these engines already; leave it out"


def test_other_arguments_reach_vllm(arguments: dict[str, Any]) -> None:
    assert arguments["passed on"] == {"enable_prefix_caching": False, "speculative_config": None}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    assert arguments["drafts"]["speculative_config"] == drafts
