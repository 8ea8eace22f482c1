"""Samples of a real engine as micro-batches, for tests that score them in other processes.

As a script (`engine_samples.py MODEL OUT`) it is the process that the engine lives in: Megatron and vLLM never share one.
"""

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np

from beam_rl.samples import Completion, MicroBatch, Prompt, Request, Sample, pack_one

PROMPTS = [[5, 9, 17, 33], [7, 60, 21, 3, 44, 18], [11, 40], [2 + i for i in range(13)]]
LENGTHS = [(30, 13), (21,), (7, 12, 11), (17, 9)]  # response tokens at most, by micro-batch


def engine_batches(model: Path, folder: Path) -> list[MicroBatch]:
    """Four micro-batches of responses that an FP32 engine sampled from `model`, with its log-probabilities and routes."""
    file = folder / "engine.pickle"
    if not file.exists():
        command = [sys.executable, __file__, str(model), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    return pickle.loads(file.read_bytes())


def _requests() -> list[list[Request]]:
    return [
        [
            Request(f"{i}-{j}", PROMPTS[(i + j) % len(PROMPTS)], seed=10 * i + j, max_tokens=length, temperature=1.0)
            for j, length in enumerate(lengths)
        ]
        for i, lengths in enumerate(LENGTHS)
    ]


async def _sample(model: Path, logs: Path) -> dict[str, Completion]:
    from rollout_fixtures import settings

    from beam_rl.rollout.engine import Engine

    engine = Engine(settings(model, "fp32", "samples", logs))
    await engine.start()
    try:
        requests = [request for group in _requests() for request in group]
        return {completion.id: completion async for completion in engine.generate(requests)}
    finally:
        await engine.stop()


def _batch(requests: list[Request], done: dict[str, Completion]) -> MicroBatch:
    samples = [
        Sample(Prompt(i, i, r.prompt_ids, ""), done[r.id], advantage=1.0 - 2 * (i % 2), weight=0.01)
        for i, r in enumerate(requests)
    ]
    batch = pack_one(samples, range(len(samples)))
    assert batch.routes is not None and np.isfinite(batch.logp_engine).all()
    return batch


def main(model: Path, out: Path) -> None:
    done = asyncio.run(_sample(model, out.parent))
    out.write_bytes(pickle.dumps([_batch(requests, done) for requests in _requests()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
