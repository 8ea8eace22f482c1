"""The driver's handle on the vLLM engines: one Ray actor each, all serving the same version of the weights."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from beam_rl.gpus import share_for
from beam_rl.inputs import adapter_for
from beam_rl.parity.record import Records
from beam_rl.recipe.tree import Recipe
from beam_rl.samples import Completion, Request


class Engines:
    """All engines of a run as a context; they serve once `starting` is done."""

    def __init__(self, recipe: Recipe, model_path: Path, logs: Path) -> None:
        self.recipe, self.model_path, self.logs = recipe, model_path, logs

    def __enter__(self) -> "Engines":
        import ray

        from beam_rl.rollout.engine import Engine

        actor: Any = ray.remote(num_cpus=1, num_gpus=share_for(self.recipe), max_concurrency=10_000)(Engine)
        self.actors = [actor.remote(self._settings(i)) for i in range(self.recipe.rollout.engines)]
        self.starting = [a.start.remote() for a in self.actors]
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        stopping = [a.stop.remote() for a in self.actors]
        ray.wait(stopping, num_returns=len(stopping), timeout=10)
        for actor in self.actors:
            ray.kill(actor)

    def sync_places(self, only: Sequence[int]) -> list[Any]:
        """Asks these engines where their workers are; the unfinished calls."""
        return [self.actors[i].sync_places.remote() for i in only]

    def join_sync(self, only: Sequence[int], joins: Sequence[dict[str, Any]]) -> list[Any]:
        """Starts these engines' joining of the trainer's weight sync; their unfinished calls."""
        return [self.actors[i].join_sync.remote(join) for i, join in zip(only, joins, strict=True)]

    def begin_update(self, only: Sequence[int]) -> list[Any]:
        """Starts a weight update in these engines; their unfinished calls."""
        return [self.actors[i].begin_update.remote() for i in only]

    def finish_update(self, only: Sequence[int], version: int) -> list[Any]:
        """Closes it: each engine has all the tensors and serves `version`; unfinished calls that tell of its adapter."""
        return [self.actors[i].finish_update.remote(version) for i in only]

    def abandon_update(self, only: Sequence[int]) -> list[Any]:
        """Ends an update that another engine's failure has cut off; the unfinished calls."""
        return [self.actors[i].abandon_update.remote() for i in only]

    def generate(
        self, groups: Sequence[Sequence[Request]], on_progress: Callable[[int], None] | None = None
    ) -> dict[str, Completion]:
        """Samples all requests at once; a group's requests (one prompt) go to one engine, which shares their prefix.

        Args:
            on_progress: called with the number of new completions.
        Returns:
            completions by request id.
        """
        shares: list[list[Request]] = [[] for _ in self.actors]
        for i, group in enumerate(groups):
            shares[i % len(shares)].extend(group)
        done: dict[str, Completion] = {}

        async def collect(actor: Any, requests: list[Request]) -> None:
            async for ref in actor.generate.options(num_returns="streaming").remote(requests):
                completion = await ref
                done[completion.id] = completion
                if on_progress:
                    on_progress(1)

        async def everything() -> None:
            await asyncio.gather(*(collect(a, r) for a, r in zip(self.actors, shares, strict=True) if r))

        asyncio.run(everything())
        return done

    def forget_prefixes(self) -> None:
        """Empties the prefix caches, so that what comes next does not hang on what was sampled before."""
        import ray

        ray.get([a.forget_prefixes.remote() for a in self.actors], timeout=self.recipe.sync.deadline_s)

    def probe(self, token_ids: list[int], routes: Any, temperature: float) -> Records:
        """One sequence through the first engine, every sub-layer recorded (`rollout.engine.Engine.probe`)."""
        import ray

        return ray.get(self.actors[0].probe.remote(token_ids, routes, temperature))

    def _settings(self, index: int) -> Any:
        from beam_rl.rollout.launch import EngineSettings

        r = self.recipe.rollout
        return EngineSettings(
            model=str(self.model_path),
            dtype=self.recipe.trainer.precision,
            max_model_len=self.recipe.data.max_prompt_tokens + r.max_response_tokens,
            max_num_seqs=r.max_num_seqs,
            max_batched_tokens=r.max_batched_tokens,
            kv_cache_gib=r.kv_cache_gib,
            gpu_memory_utilization=r.gpu_memory_utilization,
            seed=self.recipe.seed,
            routing_replay=r.routing_replay,
            host="127.0.0.1",
            log_dir=str(self.logs),
            name=f"engine-{index}",
            adapter=adapter_for(self.recipe, self.model_path),
        )
