"""A whole run in this process, step by step: for the tests that kill engines in the middle of it."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import ray

from beam_rl.cluster import Cluster
from beam_rl.inputs import prepare
from beam_rl.loop import Loop
from beam_rl.recipe.load import load
from beam_rl.report import Console, Report
from beam_rl.run import Run
from beam_rl.step import Quiet
from beam_rl.verifiers import make_verifier

TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
SMALL = ["rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "eval.every=0", "checkpoint.every=0"]
SMALL += ["logging.wandb=disabled", "logging.samples_per_step=0", "trainer.steps=1000"]


class LiveRun:
    """The loop, and what it has trained on."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.trained = loop, []
        self.before: set[int] = set()  # prompts that were trained on before this process
        take = loop.rollouts.take

        def noted(step):
            rollout = take(step)
            self.trained += [s.completion.id for s in rollout.samples]
            return rollout

        loop.rollouts.take = noted

    def step_until(self, condition: Callable[[], bool], patience_s: float = 240) -> None:
        end = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < end, [(s.state, s.restarts, s.last_error) for s in self.loop.engines.slots]
            self.loop.step()

    def all_serve(self) -> bool:
        return len(self.loop.engines.serving()) == len(self.loop.engines.slots)

    def pids(self, engine: int) -> tuple[int, int]:
        """Of the engine's actor and of vLLM's own process under it."""
        info = ray.get(self.loop.engines.slots[engine].starting, timeout=60)
        return info.pid, info.child_pids[0]

    def nothing_lost(self) -> None:
        """Every sample was trained on once, and every prompt begun is trained on or under way."""
        assert len(self.trained) == len(set(self.trained))
        state, under_way = self.loop.rollouts.flights.snapshot()
        trained = self.before | {int(name.split("-")[1]) for name in self.trained}
        waiting = {f.prompt.position for f in under_way}
        assert trained | waiting == set(range(state)) and not trained & waiting

    def weights_of(self, engine: int, name: str):
        return ray.get(self.loop.engines.slots[engine].actor.weight.remote(name), timeout=60)


@contextlib.contextmanager
def live_cluster(logs: Path, *overrides: str) -> Iterator[Cluster]:
    """Trainer and engines, to go through runs with that differ in what the driver alone decides."""
    recipe = load(TINY, [*SMALL, *overrides])
    with Cluster(recipe, prepare(recipe, Quiet()).model_path, logs, Quiet()) as cluster:
        yield cluster


@contextlib.contextmanager
def on(cluster: Cluster, folder: Path, *overrides: str, resume: Path | None = None) -> Iterator[LiveRun]:
    """A run that has begun; its overrides come after those of the cluster."""
    recipe = load(TINY, [*SMALL, *overrides])
    with contextlib.ExitStack() as stack:
        console = stack.enter_context(Console(0, file=stack.enter_context(open(os.devnull, "w"))))
        run = stack.enter_context(Run.open(folder, recipe.model_dump(mode="json"), resume))
        report = stack.enter_context(Report(console, run, recipe.logging))
        verifier = stack.enter_context(make_verifier(recipe.verifier))
        live = LiveRun(Loop(recipe, prepare(recipe, Quiet()), run, report, cluster, verifier))
        live.loop.begin()
        if live.loop.state.step:
            live.before = set(range(live.loop.state.prompts)) - {f.prompt.position for f in live.loop.under_way}
        yield live
        live.loop.rollouts.hold()  # the engines are others' next
        live.loop.saver.wait()


def while_sampling(live: LiveRun, engine: int, act: Callable[[], None], seed: int) -> threading.Thread:
    """Acts at a random moment while an engine has something to answer."""
    slot, delay = live.loop.engines.slots[engine], random.Random(seed).uniform(0, 0.15)

    def wait_and_act() -> None:
        while not (slot.load and slot.state == "serving"):
            time.sleep(0.001)
        time.sleep(delay)
        act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    return thread


def in_the_next_sync(live: LiveRun, act: Callable[[], None]) -> None:
    """Acts when the engines have opened an update and the trainer is about to send."""
    send = live.loop.policy.send_weights

    def act_and_send(actors):
        live.loop.policy.send_weights = send
        act()
        return send(actors)

    live.loop.policy.send_weights = act_and_send


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    psutil.Process(pid).suspend()
