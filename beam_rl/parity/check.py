"""The same tokens through reference, trainer and engine: started as a run would, then compared.

The engine samples the responses first, so the tokens, their log-probabilities and routes are what training sees. Knows
nothing about Megatron, vLLM or transformers beyond their handles.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_rl.cluster import Cluster
from beam_rl.engines import Engines
from beam_rl.inputs import Inputs, start_adapter
from beam_rl.parity.compare import Comparison, Side, compare
from beam_rl.parity.record import Records, concatenate
from beam_rl.recipe.tree import Recipe
from beam_rl.routes import invalid_rows
from beam_rl.samples import Prompt, Request, Sample, sampling_seed
from beam_rl.step import Display

# The reference multiplies in BF16 where the trainer does in MXFP8: an MLP's three products of it are off by 6 %.
SUBLAYER_BOUND = {"fp32": 1e-5, "bf16": 2e-2, "mxfp8": 1e-1}
LOGPROB_MEAN_BOUND = {"fp32": 1e-5, "bf16": 1e-2, "mxfp8": 3e-2}


class ReferenceWorker:
    """`parity.reference.Reference` in a process that imports nothing before it is asked to."""

    def start(self, *reference: Any) -> None:
        from beam_rl.parity.reference import Reference

        self.reference = Reference(*reference)

    def probe(self, token_ids: list[int], routes: NDArray[np.integer] | None) -> Records:
        return self.reference.probe(np.asarray(token_ids), routes)


def check(recipe: Recipe, inputs: Inputs, folder: Path, display: Display) -> Comparison:
    """Starts all three sides, samples `parity.prompts` responses, and compares.

    Raises:
        RuntimeError: an engine's sample came without routes that can be replayed, where the recipe asks for replay.
    """
    import ray

    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(recipe, inputs.model_path, folder, display))
        worker: Any = ray.remote(num_cpus=1)(ReferenceWorker).remote()
        stack.callback(ray.kill, worker)
        numerics, temperature = recipe.trainer.numerics, recipe.rollout.temperature
        head = (numerics == "engine", temperature, start_adapter(recipe), numerics == "fp32_head")
        loading = worker.start.remote(str(inputs.model_path), recipe.trainer.dtype, *head)
        with display.phase("syncing", once=True), cluster.turns.to_engines():
            cluster.sync.bring(0)
        samples = sample(recipe, inputs, cluster.engines)
        with display.phase("probing trainer, engine and reference", once=True):
            ray.get(loading)
            engine = [cluster.engines.probe(token_ids(s), s.completion.routes, temperature) for s in samples]
            cluster.turns.to_trainer()
            trainer = cluster.policy.probe(samples)
            reference = ray.get([worker.probe.remote(token_ids(s), s.completion.routes) for s in samples])
    as_sampled = np.concatenate([s.completion.logp for s in samples])
    sides = {
        "reference": Side(concatenate(reference), response_logp(samples, reference)),
        "trainer": Side(concatenate(trainer), response_logp(samples, trainer)),
        "engine": Side(concatenate(engine), as_sampled),
    }
    bounds, precision = recipe.parity, recipe.rollout_precision
    return compare(
        sides,
        replayed=recipe.rollout.routing_replay,
        sublayer_bound=bounds.sublayer_bound or SUBLAYER_BOUND[precision],
        logprob_mean_bound=logprob_mean_bound(recipe),
    )


def logprob_mean_bound(recipe: Recipe) -> float:
    """Of the mean |Δlogp|, nats: the recipe's, or what the engine's precision allows."""
    return recipe.parity.logprob_mean_bound or LOGPROB_MEAN_BOUND[recipe.rollout_precision]


def sample(
    recipe: Recipe, inputs: Inputs, engines: Engines, max_tokens: int | None = None, only: slice = slice(None)
) -> list[Sample]:
    """One response for each of the first eval prompts, or of the training prompts where there is no eval set.

    max_tokens: of each response; default: as in training. only: those of the prompts.
    """
    wanted, longest = recipe.parity.prompts, recipe.rollout.max_response_tokens
    prompts = inputs.eval_prompts[:wanted] or [inputs.prompts.at(i) for i in range(wanted)]
    prompts = prompts[only]
    requests = [_request(p, recipe, min(longest, max_tokens or longest)) for p in prompts]
    done = engines.generate([[r] for r in requests])
    samples = [Sample(p, done[r.id]) for p, r in zip(prompts, requests, strict=True)]
    if recipe.rollout.routing_replay:
        for s in samples:
            routes = s.completion.routes
            if routes is None or len(routes) != s.model_tokens or invalid_rows(routes, inputs.num_experts).any():
                raise RuntimeError(
                    f"rollout.routing_replay is on, but the engine's routes of request {s.completion.id} can't be replayed"
                )
    return samples


def _request(prompt: Prompt, recipe: Recipe, max_tokens: int) -> Request:
    return Request(
        id=f"parity-{prompt.position}",
        prompt_ids=prompt.token_ids,
        seed=sampling_seed(recipe.seed, "parity", prompt.position),
        max_tokens=max_tokens,
        temperature=recipe.rollout.temperature,
    )


def token_ids(sample: Sample) -> list[int]:
    return [*sample.prompt.token_ids, *sample.completion.token_ids.tolist()]


def response_logp(samples: Sequence[Sample], records: Sequence[Records]) -> NDArray[np.float32]:
    """(response tokens,) of all samples end to end."""
    each = [
        r[None, "log_probabilities"][len(s.prompt.token_ids) - 1 :, 0] for s, r in zip(samples, records, strict=True)
    ]
    return np.concatenate(each)
