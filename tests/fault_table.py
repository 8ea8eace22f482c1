"""Kills real runs at seeded moments: prints the table of docs/faults.md, or writes it there.

    python -m tests.fault_table [--write] [--seed N]

A chain of strikes falls on one run, which is resumed after each; at its end every step must be that of a run that nobody
disturbed. Exits 1 where something was lost.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from killer import LOG, Strike

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults.md"
START, END = "<!-- table: python -m tests.fault_table --write -->", "<!-- end of the table -->"
TINY = ROOT / "recipes" / "tiny_cpu.yaml"
SMALL = [
    "trainer.parallel.dp=2",
    "trainer.deterministic=true",
    "trainer.collective_timeout_s=60",
    "sync.deadline_s=50",
    "rollout.prompts_per_step=8",
    "data.train.limit=20",  # an epoch ends in the middle of a step
    "checkpoint.every=1",
    "eval.every=0",
    "logging.wandb=disabled",
    "logging.samples_per_step=1000",
]
OF_TIME = ("time/", "sync/seconds", "rollout/tokens_per_s", "optim/tflops", "memory/")
OF_TIME += ("rollout/engine_restarts", "rollout/redone")


@dataclass(frozen=True)
class Kill:
    """A row. lost: in words; "nothing" is what there should be."""

    victim: str
    moment: str
    signal: str
    outcome: str  # what the run did
    lost: str
    recovery_s: float  # from the strike to the first whole step after it


@dataclass(frozen=True)
class Case:
    """A strike and what the run must do then."""

    moment: str
    strike: Strike
    code: int  # the run's exit code; of one that should survive the strike 0, too
    says: str = ""  # on stderr


def cases(rng: random.Random) -> list[Case]:
    """What kills a trainer, a save or a driver. Each falls into the second step after its start."""

    def rank(call: str, moment: str, up_to_s: float, says: str, nth: int = 2, signal: str = "SIGKILL") -> Case:
        victim = f"rank {rng.randrange(2)}"
        return Case(
            moment, Strike(f"beam_rl.policy:Policy.{call}", nth, victim, rng.uniform(0, up_to_s), signal), 1, says
        )

    def driver(at: str, moment: str, signal: str, up_to_s: float, code: int, nth: int = 2) -> Case:
        return Case(moment, Strike(at, nth, "driver", rng.uniform(0, up_to_s), signal), code)

    died = "died at"
    return [
        rank("score", "scoring", 0.1, died, nth=3),  # the first is the check at the start
        rank("update", "updating", 0.15, died, nth=4),
        rank("send_weights", "sending weights", 0.1, died, nth=3),
        rank("stage", "copying for a save", 0.02, died),
        rank("write", "writing a checkpoint", 0.2, died),
        driver("beam_rl.saver:Saver.save", "writing a checkpoint", "SIGKILL", 0.4, -9),
        driver("beam_rl.policy:Policy.update", "updating", "SIGKILL", 0.1, -9, nth=3),
        driver("beam_rl.sampling:sample_groups", "sampling", "SIGTERM", 0.2, 0),
        driver("beam_rl.policy:Policy.update", "updating", "SIGTERM", 0.1, 0, nth=3),
        driver("beam_rl.saver:Saver.save", "saving", "SIGTERM", 0.2, 0),
        rank("update", "updating", 0.15, "did not go on", nth=4, signal="SIGSTOP"),
    ]


def verifiers(rng: random.Random) -> Iterator[Kill]:
    """All workers of a pool at once, at their start or at work: every answer has its one right verdict."""
    from beam_rl.verifiers import VerifierPool, VerifyItem

    answers = [str(n) for n in range(4, 7)] * 40 + [rf"\frac{{{n}}}{{7}}" for n in range(60)]
    items = [VerifyItem(rf"\boxed{{{answer}}}", "5", "stop") for answer in answers]
    right = [float(answer in ("5", r"\frac{35}{7}")) for answer in answers]
    for moment, name in (("starting", "SIGKILL"), ("judging", "SIGKILL"), ("judging", "SIGSTOP")):
        with VerifierPool(workers=2, timeout_s=2.0) as pool:
            usual, begun = 0.0, time.monotonic()
            if moment == "judging":
                pool.score(items)  # which includes the start
                begun = time.monotonic()
                pool.score(items)
                usual, begun = time.monotonic() - begun, time.monotonic()
            for worker in pool._workers:
                delay_s = rng.uniform(0, 0.1)
                threading.Timer(delay_s, worker.process.send_signal, [signal.Signals[name]]).start()
            verdicts = pool.score(items)
            took = time.monotonic() - begun - usual
        assert [v.score for v in verdicts] == right and not any(v.error or v.timed_out for v in verdicts)
        yield Kill("verifier, both workers", moment, name, "goes on", "nothing", max(0.0, took))


def engines(rng: random.Random, folder: Path) -> Iterator[Kill]:
    """One of two engines that sample all the time, again and again: the run goes on with the other one."""
    from live_run import in_the_next_sync, kill, live_cluster, on, stop, while_sampling

    overrides = ["rollout.engines=2", "rollout.pace=asynchronous", "rollout.engine_restarts=99"]
    overrides += ["rollout.engine_deadline_s=10", "sync.deadline_s=20"]
    plans = [
        ("sampling", "actor", kill), ("a sync", "actor", kill), ("sampling", "vLLM", kill), ("a sync", "vLLM", kill),
        ("sampling", "vLLM", stop), ("a sync", "vLLM", stop), ("sampling", "both engines", kill),
    ]  # fmt: skip
    with live_cluster(folder / "logs", *overrides) as cluster, on(cluster, folder / "run", *overrides) as live:
        slots = live.loop.engines.slots
        for moment, what, act in plans:
            live.step_until(live.all_serve)
            chosen = [0, 1] if what == "both engines" else [rng.randrange(2)]
            pids = [live.pids(i)[what == "vLLM"] for i in chosen]
            before, struck = sum(slots[i].restarts for i in chosen), time.monotonic()

            def strike(pids: Sequence[int] = pids, act: Callable[[int], None] = act) -> None:
                for pid in pids:
                    act(pid)

            if moment == "sampling":
                while_sampling(live, chosen[0], strike, seed=rng.randrange(1000))
            else:
                in_the_next_sync(live, strike)
            live.step_until(lambda n=before, c=chosen: sum(slots[i].restarts for i in c) > n)
            live.step_until(live.all_serve)
            took = time.monotonic() - struck
            live.nothing_lost()
            live.loop.check_engines()
            victim = what if len(chosen) == 2 else f"engine {chosen[0]}, {'its process' if what == 'actor' else what}"
            found = Kill(victim, moment, "SIGKILL" if act is kill else "SIGSTOP", "goes on", "nothing", took)
            print(found, file=sys.stderr, flush=True)
            yield found


def node(folder: Path) -> Kill:
    """The raylet of a node that holds one of two engines; another node joins when the run has gone on without it."""
    from beam_rl.tiny import cached_tiny

    program = Path(__file__).with_name("node_loss.py")
    command = [sys.executable, program, cached_tiny(0), folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]  # it looks for what is lost itself
    took = json.loads(done.stdout.splitlines()[-1])["recovery_s"]
    return Kill("Ray node of engine 1", "between steps", "SIGKILL", "goes on, and on a new node", "nothing", took)


def chain(cases: Sequence[Case], folder: Path, recipe: Sequence[str] = ()) -> list[Kill]:
    """Strikes one run again and again; a row for each case. Raises AssertionError where something was lost.

    What resumes the run after a strike is the run that the next strike falls on.
    """
    struck, whole, overrides = folder / "struck", folder / "whole", [*SMALL, *recipe]
    found: list[Kill] = []
    pending: tuple[Case, float, str, str] | None = None  # a strike that the run has not recovered from yet
    for i, case in enumerate([*cases, None]):
        kept, log = last_checkpoint(struck), folder / f"strike {i}"
        process = start(struck, [*overrides, f"trainer.steps={kept + (4 if case else 2)}"], log, case and case.strike)
        if pending:
            found.append(row(*pending, first_step_after(struck, kept, process)))
            print(found[-1], file=sys.stderr, flush=True)
        _, err = process.communicate(timeout=600)
        assert process.returncode == (case.code if case else 0), f"{case}: {process.returncode}\n{err}"
        if case:
            assert case.says in err, f"{case}: {err}"
            hit = json.loads(log.read_text())["time"]
            ends = f"ends after {time.time() - hit:.1f} s with {case.code}" if case.code >= 0 else "is gone"
            missing = last_step(struck) - last_checkpoint(struck)
            pending = (case, hit, ends, f"{missing} step, made again" if missing > 0 else "nothing")
    steps = last_step(struck)
    process = start(whole, [*overrides, f"trainer.steps={steps}"], folder / "none", None)
    assert process.wait(600) == 0
    compare(whole, struck, steps)
    return found


def row(case: Case, hit: float, outcome: str, lost: str, recovered: float) -> Kill:
    return Kill(case.strike.victim, case.moment, case.strike.signal, outcome, lost, recovered - hit)


def first_step_after(out: Path, kept: int, process: subprocess.Popen[str]) -> float:
    """When the resumed run reported the step after the checkpoint that it went on from."""
    begun = time.time()
    path = out / "metrics.jsonl"
    while process.poll() is None:
        if last_step(out) > kept and path.stat().st_mtime > begun and path.stat().st_mtime - begun > 3:
            break
        time.sleep(0.1)
    return time.time()


def start(out: Path, overrides: Sequence[str], log: Path, strike: Strike | None) -> subprocess.Popen[str]:
    program = [str(ROOT / "tests" / "killer.py"), strike.plan()] if strike else ["-m", "beam_rl.cli"]
    return subprocess.Popen(
        [sys.executable, *program, "train", str(TINY), *overrides, "--out", str(out), "--resume", "auto"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {LOG: str(log)},
    )


def last_step(out: Path) -> int:
    steps = [line["step"] for line in metrics(out)]
    return max(steps, default=0)


def metrics(out: Path) -> list[dict]:
    lines = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def last_checkpoint(out: Path) -> int:
    from beam_rl.run import checkpoints

    return max((c.step for c in checkpoints(out)), default=0)


def compare(whole: Path, struck: Path, steps: int) -> None:
    """Every number that is not of time, and every sample, are the same."""
    for there, here in zip(metrics(whole), metrics(struck), strict=True):
        differing = {k for k in there.keys() | here.keys() if there.get(k) != here.get(k) and not k.startswith(OF_TIME)}
        assert not differing, f"step {there['step']}: {sorted(differing)}"
    for step in range(1, steps + 1):
        name = f"samples/step_{step}.jsonl"
        assert (whole / name).read_text() == (struck / name).read_text(), name


def table(kills: Sequence[Kill]) -> str:
    lines = ["| killed | while | with | the run | lost | recovery |", "| --- | --- | --- | --- | --- | --- |"]
    for k in kills:
        lines.append(f"| {k.victim} | {k.moment} | {k.signal} | {k.outcome} | {k.lost} | {k.recovery_s:.0f} s |")
    return "\n".join(lines)


def main(write: bool, seed: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        kills = [*chain(cases(random.Random(seed)), Path(folder)), *verifiers(random.Random(seed))]
        kills += [*engines(random.Random(seed), Path(folder)), node(Path(folder, "node"))]
    text = table(kills)
    print(text)
    if write:
        page = PAGE.read_text()
        PAGE.write_text(f"{page.split(START)[0]}{START}\n{text}\n{END}{page.split(END)[1]}")
    return 0


if __name__ == "__main__":
    seeds = [int(b) for a, b in zip(sys.argv, sys.argv[1:], strict=False) if a == "--seed"]
    sys.exit(main("--write" in sys.argv[1:], (seeds or [0])[0]))
