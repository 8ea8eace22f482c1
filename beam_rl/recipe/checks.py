"""Combinations of recipe keys that can't work: each names the key, its value, the reason and what would do.

Pure functions of the recipe's values; nothing here looks at files or machines.
"""

import difflib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from beam_rl.lora import ALL_TARGETS, TOGETHER
from beam_rl.placement import for_pace

if TYPE_CHECKING:
    from beam_rl.recipe.tree import Recipe

LOWEST_TEMPERATURE = 0.01  # of vLLM, above greedy
PATIENCE = 1.2  # of the ranks that wait while the first one waits for an engine, in units of the engine's own time
ENGINE_KEYS = {  # vLLM's arguments that a recipe has other keys for
    "dtype": "trainer.precision",
    "enable_expert_parallel": "rollout.parallel.ep",
    "enable_lora": "model.lora",
    "enable_return_routed_experts": "rollout.routing_replay",
    "data_parallel_size": "rollout.parallel.dp",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "max_model_len": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_batched_tokens": "rollout.max_batched_tokens",
    "max_num_seqs": "rollout.max_num_seqs",
    "model": "model.path",
    "pipeline_parallel_size": "rollout.parallel.pp",
    "seed": "seed",
    "speculative_config": "rollout.speculative",
    "tensor_parallel_size": "rollout.parallel.tp",
}
PAGE_BYTES, SMALLEST_BLOCK_BYTES = 4096, 65536


def check(recipe: "Recipe") -> None:
    """Raises ValueError with the first problem, if there is one."""
    for problem in (
        *_lora(recipe),
        *_sampling(recipe),
        *_verifier(recipe),
        *_environment(recipe),
        *_placement(recipe),
        *_batch(recipe),
        *_times(recipe),
        *_algorithm(recipe),
        *_evaluation(recipe),
        *_offload(recipe),
        *_mxfp8(recipe),
        *_profile(recipe),
    ):
        raise ValueError(problem)


def _lora(recipe: "Recipe") -> Iterator[str]:
    """What can be seen without the model; `lora.adapter_of` divides the rank by its top-k."""
    if engines := recipe.rollout.checkpoint:
        if recipe.model.lora is None:
            yield (
                f"rollout.checkpoint = {engines}: a sync of all weights would overwrite it; only with model.lora, which "
                "leaves the model as it is"
            )
        if recipe.rollout_precision == "mxfp8":
            yield f"rollout.checkpoint = {engines}: its weights have a form, and MXFP8 would be another; use one of them"
    if recipe.model.lora is None:
        return
    if (p := recipe.rollout.parallel).dp > 1 and p.ep > 1:
        yield (
            f"rollout.parallel.dp = {p.dp} and ep = {p.ep}: with model.lora an engine's experts are spread over tp workers "
            "alone; use dp = 1, and rollout.engines for more"
        )
    targets = recipe.model.lora.targets
    if not targets:
        yield "model.lora.targets = []: name at least one, or leave out model.lora to train all weights"
    for target in targets:
        if target not in ALL_TARGETS:
            alike = [known for known in ALL_TARGETS if known.endswith(f".{target.rpartition('.')[2]}")]
            near = alike or difflib.get_close_matches(target, ALL_TARGETS, 1, 0.4) or ALL_TARGETS
            yield f"model.lora.targets: {target} is none of {', '.join(ALL_TARGETS)}; did you mean {near[0]}?"
    for group, why in TOGETHER:
        missing = [target for target in group if target not in targets]
        if missing and len(missing) < len(group):
            yield f"model.lora.targets lacks {', '.join(missing)}: {why}, so {', '.join(group)} come together or not at all"


def _sampling(recipe: "Recipe") -> Iterator[str]:
    r = recipe.rollout
    if r.samples_per_prompt < 2:
        yield (
            f"rollout.samples_per_prompt = {r.samples_per_prompt}: a group needs at least 2 samples for a relative "
            "advantage"
        )
    if r.temperature < LOWEST_TEMPERATURE:
        yield (
            f"rollout.temperature = {r.temperature}: training samples need a temperature of {LOWEST_TEMPERATURE} or more "
            "(vLLM raises a lower one to that, and at 0 every sample of a group is the same); use 1.0"
        )
    if r.top_p < 1:
        yield (
            f"rollout.top_p = {r.top_p}: below 1 the engine renormalises over a set of tokens that the trainer does "
            "not replay, so their log-probabilities differ; use 1.0"
        )
    for name in r.engine_args:
        if name in ENGINE_KEYS:
            yield f"rollout.engine_args.{name}: the recipe has {ENGINE_KEYS[name]} for it"
    if r.speculative and r.speculative.method == "ngram" and r.speculative.model:
        yield f"rollout.speculative.model = {r.speculative.model}: the method ngram has no drafter; name another method"


def _verifier(recipe: "Recipe") -> Iterator[str]:
    name = recipe.verifier.name
    if name not in ("math", "toy") and not all(name.rpartition(":")[::2]):
        yield (
            f"verifier.name = {name}: neither math nor toy; your own is written module:function or FILE.py:function "
            "(docs/own_reward.md)"
        )


def _environment(recipe: "Recipe") -> Iterator[str]:
    environment = recipe.environment
    if environment is None:
        return
    if environment.name != "second_try" and not all(environment.name.rpartition(":")[::2]):
        yield (
            f"environment.name = {environment.name}: not second_try; your own is written module:Class or FILE.py:Class "
            "(docs/environments.md)"
        )
    for name, value in environment.options.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            yield f"environment.options.{name} = {value}: numbers, texts, lists and mappings reach another process alone"


def _placement(recipe: "Recipe") -> Iterator[str]:
    """What does not hang on the machines; `placement.place` says whether they are enough."""
    r, p = recipe.rollout, recipe.rollout.parallel
    if recipe.cluster.placement == "colocated" and r.pace != "synchronous":
        yield (
            f"rollout.pace = {r.pace}: with cluster.placement = colocated the engines rest while the trainer works; use "
            "rollout.pace = synchronous, or cluster.placement = disaggregated"
        )
    if p.ep not in (1, p.tp * p.dp):
        yield (
            f"rollout.parallel.ep = {p.ep}: an engine spreads its experts over all tp · dp = {p.tp * p.dp} workers of a "
            f"stage or splits each one; use {p.tp * p.dp} or 1"
        )


def _batch(recipe: "Recipe") -> Iterator[str]:
    r, t = recipe.rollout, recipe.trainer
    if r.prompts_per_step % t.mini_batches:
        yield (
            f"trainer.mini_batches = {t.mini_batches}: must divide rollout.prompts_per_step = {r.prompts_per_step}, "
            "since a group is never split over updates"
        )
    if r.over_sampling > 1 and r.pace == "asynchronous":
        yield (
            f"rollout.over_sampling = {r.over_sampling:g}: asynchronous sampling never waits for the last response of a "
            "batch; leave it at 1, and raise algorithm.staleness to have more under way"
        )
    if r.engines > r.prompts_per_step:
        yield f"rollout.engines = {r.engines}: more than rollout.prompts_per_step = {r.prompts_per_step}; some would idle"
    longest = recipe.data.max_prompt_tokens + r.max_response_tokens
    if r.max_batched_tokens < r.max_num_seqs:
        yield (
            f"rollout.max_batched_tokens = {r.max_batched_tokens}: below rollout.max_num_seqs = {r.max_num_seqs}, so "
            "the running requests could not all take a step; raise it or lower rollout.max_num_seqs"
        )
    if t.token_budget < longest:
        yield (
            f"trainer.token_budget = {t.token_budget}: the longest sample has data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {longest} tokens and must fit in one micro-batch; use at least {longest}"
        )


def _times(recipe: "Recipe") -> Iterator[str]:
    limit, deadline = recipe.trainer.collective_timeout_s, recipe.sync.deadline_s
    if recipe.trainer.parallel.ranks > 1 and limit < PATIENCE * deadline:
        yield (
            f"trainer.collective_timeout_s = {limit:g}: while the first rank waits sync.deadline_s = {deadline:g} s for an "
            f"engine that hangs, the others wait for it; use at least {PATIENCE * deadline:g}, or lower sync.deadline_s"
        )


def _algorithm(recipe: "Recipe") -> Iterator[str]:
    a, limit = recipe.algorithm, recipe.rollout.max_response_tokens
    if a.overlong.buffer_tokens >= limit:
        yield (
            f"algorithm.overlong.buffer_tokens = {a.overlong.buffer_tokens}: must be below "
            f"rollout.max_response_tokens = {limit}, or every response is punished"
        )
    if a.clip_low > 1:
        yield f"algorithm.clip_low = {a.clip_low}: above 1 the lower bound 1 − clip_low is negative and never binds"
    if a.loss == "gspo" and a.aggregation != "sample_mean":
        yield (
            f"algorithm.aggregation = {a.aggregation}: GSPO's ratio belongs to a whole response, so it is averaged by "
            "response; use sample_mean"
        )
    c = a.importance_correction
    if c.kind == "truncate" and c.high < 1:
        yield (f"algorithm.importance_correction.high = {c.high}: below 1 it would scale every token down; use 2.0")
    if c.kind == "mask" and c.low >= c.high:
        yield (
            f"algorithm.importance_correction.low = {c.low}: must be below "
            f"algorithm.importance_correction.high = {c.high}, or every token is masked"
        )


def _evaluation(recipe: "Recipe") -> Iterator[str]:
    if recipe.checkpoint.keep_best and recipe.data.eval is not None and recipe.eval.every:
        every = recipe.checkpoint.every
        if every and recipe.eval.every % every and every % recipe.eval.every:
            yield (
                f"checkpoint.every = {every}: with checkpoint.keep_best it must be a multiple or a divisor of "
                f"eval.every = {recipe.eval.every}, so that the best evaluated step has a checkpoint"
            )
    if 0 < recipe.eval.temperature < LOWEST_TEMPERATURE:
        yield (
            f"eval.temperature = {recipe.eval.temperature}: vLLM raises it to {LOWEST_TEMPERATURE}; use 0 (greedy) or "
            f"{LOWEST_TEMPERATURE} and more"
        )
    if recipe.eval.temperature == 0 and recipe.eval.samples_per_prompt > 1:
        yield (
            f"eval.samples_per_prompt = {recipe.eval.samples_per_prompt}: at eval.temperature = 0 all samples of a "
            "prompt are the same; use 1"
        )


def _offload(recipe: "Recipe") -> Iterator[str]:
    optimizer = recipe.trainer.optimizer
    size = optimizer.nvme.block_bytes
    if optimizer.offload == "nvme" and not optimizer.nvme.path:
        yield (
            "trainer.optimizer.nvme.path is missing: with trainer.optimizer.offload = nvme, name a folder on each node's "
            "own NVMe"
        )
    if recipe.trainer.wait_in == "nvme":
        placement = recipe.cluster.placement or for_pace(recipe.rollout.pace)
        if not optimizer.nvme.path:
            yield (
                "trainer.optimizer.nvme.path is missing: with trainer.wait_in = nvme, name a folder on each node's own NVMe"
            )
        if placement != "colocated":
            why = "" if recipe.cluster.placement else f"rollout.pace = {recipe.rollout.pace}, so "
            yield (
                f"trainer.wait_in = nvme: with {why}cluster.placement = {placement} the trainer keeps its GPUs and never "
                "has to wait; leave it out, or use colocated"
            )
    if size % PAGE_BYTES or size < SMALLEST_BLOCK_BYTES:
        yield (
            f"trainer.optimizer.nvme.block_bytes = {size}: direct I/O wants a multiple of {PAGE_BYTES}, and at least "
            f"{SMALLEST_BLOCK_BYTES}; {max(SMALLEST_BLOCK_BYTES, size // PAGE_BYTES * PAGE_BYTES)} would do"
        )
    if optimizer.nvme.moments == "bf16" and optimizer.offload == "none":
        yield (
            "trainer.optimizer.nvme.moments = bf16: only with trainer.optimizer.offload = cpu or nvme; without, moments "
            "are FP32"
        )


def _profile(recipe: "Recipe") -> Iterator[str]:
    trainer, rollout = recipe.trainer, recipe.rollout
    for key, profile in (("trainer", trainer.profile), ("rollout", rollout.profile)):
        if (last := max(profile.steps, default=0)) > trainer.steps:
            yield f"{key}.profile.steps: step {last} will not come: trainer.steps = {trainer.steps}"


def _mxfp8(recipe: "Recipe") -> Iterator[str]:
    """What can be seen without the model; `mxfp8.scheme_of` looks at its layers and sizes."""
    trainer, nowhere = recipe.trainer, recipe.rollout_precision != "mxfp8"
    for key, default in (("keep_first_layers", 0), ("keep_last_layers", 0), ("activations", True)):
        if (value := getattr(trainer.mxfp8, key)) != default and nowhere:
            yield f"trainer.mxfp8.{key} = {value}: only with trainer.precision or rollout.precision = mxfp8"
    if recipe.rollout.precision == "mxfp8" and trainer.precision == "fp32":
        yield "rollout.precision = mxfp8: with trainer.precision = bf16 or mxfp8, not fp32"
