"""The engine as a Ray actor. `generate` streams: `actor.generate.options(num_returns="streaming").remote(requests)`."""

import ray

from beam_rl.rollout.engine import Engine

EngineActor = ray.remote(Engine)
