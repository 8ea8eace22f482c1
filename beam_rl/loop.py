"""One run, as it reads: take a batch of verified samples, score, update, sync, until `trainer.steps`.

Each line leads to the room where it happens. Knows nothing about Megatron, vLLM or Ray beyond `policy` and `engines`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from beam_rl import flight
from beam_rl.algorithms.evaluation import Evaluation, standard_error
from beam_rl.algorithms.parity import logprob_gap
from beam_rl.batch import StepBatch, build
from beam_rl.cluster import Cluster
from beam_rl.episodes import make_episodes
from beam_rl.evaluate import evaluate
from beam_rl.flight import Flight
from beam_rl.inputs import Inputs
from beam_rl.interrupts import Interrupted, held, time_left
from beam_rl.parity.check import logprob_mean_bound
from beam_rl.parity.check import sample as parity_samples
from beam_rl.plan.work import update_flops
from beam_rl.policy import Scores
from beam_rl.recipe.tree import Recipe
from beam_rl.report import Report
from beam_rl.report.metric_names import eval_metric
from beam_rl.rollouts import attend, beside, make_rollouts
from beam_rl.run import Run
from beam_rl.samples import Sample
from beam_rl.sampling import Flights, Judge, Rollout, shuffle_rewards
from beam_rl.saver import Saver
from beam_rl.step import Step
from beam_rl.sync import SyncReport
from beam_rl.verifiers import make_verifier

CHECK_TOKENS = 64  # of each response that trainer and engines are compared on
SAVE_ON_EXIT_S = 15.0  # a run that is told to end has half a minute


class StepError(RuntimeError):
    """A step that must not go on: a feature did not engage, or there is nothing to learn from."""


@dataclass
class State:
    """What a resumed run needs beside the trainer's own checkpoint; written as JSON."""

    step: int = 0
    updates: int = 0
    prompts: int = 0  # position in the prompt stream
    unreported: dict[str, float] | None = field(default_factory=dict)  # of `step`, until its row is written
    settled: bool = True  # False while the trainer's weights are beyond `step`

    @contextlib.contextmanager
    def advancing(self, step: int) -> Iterator[None]:
        """Inside, the weights are on the way to `step`; after it, they are there."""
        self.settled = False
        with held():
            yield
            self.step, self.settled = step, True


def train(recipe: Recipe, inputs: Inputs, run: Run, report: Report) -> State:
    """Trains until `trainer.steps` and returns the final state; an interrupt leaves a checkpoint if one is due."""
    with (
        Cluster(recipe, inputs.model_path, run.logs, report) as cluster,
        make_verifier(recipe.verifier) as verifier,
        make_episodes(recipe.environment, inputs.frame, inputs.decode) as cluster.engines.episodes,
    ):
        loop = Loop(recipe, inputs, run, report, cluster, verifier)
        loop.begin()
        with loop.saved_if_cut_short():
            while loop.state.step < recipe.trainer.steps:
                loop.step()
            loop.save_if(loop.state.step != loop.saved)
            loop.saver.wait()
        return loop.state


class Loop:
    """A run's state and the step that moves it."""

    def __init__(
        self,
        recipe: Recipe,
        inputs: Inputs,
        run: Run,
        report: Report,
        cluster: Cluster,
        verifier: Judge,
    ) -> None:
        self.recipe, self.inputs, self.run, self.report = recipe, inputs, run, report
        self.policy, self.engines, self.weights, self.verifier = cluster.policy, cluster.engines, cluster.sync, verifier
        self.turns = cluster.turns
        self.saver = Saver(run, cluster.policy, recipe.checkpoint, recipe.model.lora is not None, report.warn)
        self.state = State()
        self.under_way: list[Flight] = []  # begun, but not trained on, when the weights of `state.step` were there
        flights = Flights(inputs.prompts, recipe)
        self.rollouts = make_rollouts(flights, self.engines, verifier, inputs.decode, recipe, self.mend)
        self.saved: int | None = None  # the step of the last checkpoint that was written, or tried
        self.eval_score: float | None = None  # of this step's evaluation, if it had one

    def begin(self) -> None:
        """The state to start from, in the trainer and in every engine; what it has not reported yet is reported."""
        if self.recipe.trainer.wait_in == "nvme" and not self.turns.shared:
            self.report.warn("trainer.wait_in = nvme does nothing here: trainer and engines share no GPU")
        if self.run.resumed:
            with self.report.phase("loading the checkpoint", once=True):
                self.state = State(**self.run.resumed.state)
                self.turns.to_trainer()
                self.policy.load(self.run.resumed.path)
            under_way = flight.load(self.run.resumed.path, self.inputs.prompts.at)
            if self.recipe.environment:  # whose processes are gone: what was not finished begins anew
                under_way = [f.without_unfinished() for f in under_way]
            self.rollouts.flights.restore(self.state.prompts, under_way)
            self.note_flights()
            self.saved = self.state.step
        step = Step(self.state.step, self.report)
        self.sync(step)
        self.check_engines()
        if self.reported():
            self.rollouts.go_on(step.number)
        else:
            step.log(self.state.unreported or {})
            self.announce(step)

    def reported(self) -> bool:
        """Whether the row of `state.step` is written; the state of a run that was cut short just then does not know."""
        return self.state.unreported is None or self.run.last_step == self.state.step

    def step(self) -> None:
        """Take a batch, score, update; then sync, evaluate when due, report; save when due."""
        self.saver.check()
        step, self.eval_score = Step(self.state.step + 1, self.report), None
        step.log(self.saver.take_metrics())
        self.trace_engines(step.number)
        rollout = self.rollouts.take(step)
        shuffle_rewards(rollout, self.recipe, step)
        self.run.log_samples(
            step.number, [s.record(self.inputs.decode(s.prompt.token_ids)) for s in self.shown(rollout.samples)]
        )
        batch = build(rollout.groups, self.recipe, self.inputs.num_experts)
        of_engines = self.engine_metrics()
        step.log(rollout_metrics(rollout, batch, step.number) | of_engines)
        if failed := rollout.environment_failures:
            why = f"{rollout.environment_problem} (samples/ has the others' reasons)"
            self.report.warn(
                f"step {step.number}: the environment failed in {failed} of {rollout.episodes} episodes: {why}"
            )
        if self.recipe.rollout.speculative is not None:
            lost = of_engines["rollout/engine_restarts"] > 0
            step.log(draft_metrics(*self.engines.take_drafts(), step.number, lost))
        with step.phase("handing the GPUs over", "turn"):
            self.turns.to_trainer()
        with self.traced(step.number):
            self.score(batch, step)
            with self.state.advancing(step.number):
                self.learn(batch, step)
                self.state.unreported = step.metrics
                self.note_flights()
            self.keep_engine_traces(step.number)
            self.sync(step)
        self.announce(step)
        every = self.recipe.checkpoint.every
        self.save_if(bool(every) and step.number % every == 0)
        self.back_to_engines()

    @contextlib.contextmanager
    def traced(self, step: int) -> Iterator[None]:
        """In a step that the recipe names, the ranks write down what they do meanwhile; the run does not hang on it."""
        if step not in self.recipe.trainer.profile.steps:
            yield
            return
        self.policy.begin_trace()
        yield
        self.warn_of_traces(step, self.policy.end_trace(self.run.folder / "profile" / f"step_{step}"))

    def trace_engines(self, step: int) -> None:
        """In a step that the recipe names, the engines write down what they do until its weights are to be synced."""
        if step in self.recipe.rollout.profile.steps:
            self.warn_of_traces(step, self.engines.begin_traces())

    def keep_engine_traces(self, step: int) -> None:
        if step in self.recipe.rollout.profile.steps:
            self.warn_of_traces(step, self.engines.end_traces(self.run.folder / "profile" / f"step_{step}"))

    def warn_of_traces(self, step: int, problems: Sequence[str]) -> None:
        for problem in problems:
            self.report.warn(f"no trace of step {step}: {problem}")

    def engine_metrics(self) -> dict[str, float]:
        """What became of the engines since the last step; a person is told of each that was lost."""
        counters = self.engines.take_counters()
        for cause in counters.causes:
            self.report.warn(f"started anew: {cause}")
        return {"rollout/engine_restarts": counters.restarts, "rollout/redone": counters.redone}

    def shown(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """As many samples as the recipe wants to see, from as many prompts as can be."""
        wanted = self.recipe.logging.samples_per_step
        return samples[:: max(1, len(samples) // wanted)][:wanted] if wanted else ()

    def sync(self, step: Step) -> None:
        with step.phase("waiting for the engines", "hold"):
            self.rollouts.hold()
        with step.phase("syncing", "sync"), held(), self.turns.to_engines():
            step.log(sync_metrics(self.weights.bring(step.number)))
        step.log(self.turns.take_metrics())

    def check_engines(self) -> None:
        """Trainer and engines agree on a few responses before anything is built on them."""
        with self.report.phase("checking that trainer and engines agree"):
            with self.engines.drafts_apart():
                samples = attend(
                    beside(lambda: parity_samples(self.recipe, self.inputs, self.engines, CHECK_TOKENS)), self.mend
                )
            self.engines.forget_prefixes()
            self.turns.to_trainer()
            gap = parity_metrics(self.policy.score([samples]))["parity/abs_logprob_diff_mean"]
        check_agreement(gap, self.recipe)
        self.back_to_engines()

    def announce(self, step: Step) -> None:
        """What the engines serve now is evaluated when due and reported, and rollouts go on with it."""
        if self.evaluation_due():
            self.evaluate(step)
        self.note_flights()
        self.rollouts.go_on(step.number)
        with held():
            self.report.step(step.number, step.close())
            self.state.unreported = None
        if self.eval_score is not None:
            self.report.refresh()

    def mend(self) -> None:
        """For while the trainer rests: engines that were lost and started anew get its weights."""
        self.policy.check()
        self.engines.check()
        if not self.turns.shared:
            self.weights.mend(self.state.step)
        elif not self.engines.serving() and self.engines.fresh():  # one engine samples on: the others wait for the sync
            with self.turns.to_engines():
                self.weights.mend(self.state.step)

    def back_to_engines(self) -> None:
        """After the trainer had a turn between two steps: where GPUs are shared, the engines have lost their weights."""
        if self.turns.trainers:
            with held(), self.turns.to_engines():
                self.weights.bring(self.state.step)

    def note_flights(self) -> None:
        """Where every prompt is now; for the checkpoint."""
        self.state.prompts, self.under_way = self.rollouts.flights.snapshot()

    def score(self, batch: StepBatch, step: Step) -> None:
        """Scores the batch with the trainer as it is: what the updates start from, and the gap to the engine."""
        if not batch.mini_batches:
            return
        with step.phase("scoring", "score"):
            scores = self.policy.score(batch.mini_batches)
            step.log(parity_metrics(scores) | replay_metrics(scores, batch, step.number))

    def learn(self, batch: StepBatch, step: Step) -> None:
        """One optimizer update a mini-batch."""
        step.log({"optim/skipped_updates": batch.skipped})
        if not batch.mini_batches:
            self.report.warn(f"step {step.number}: every group's rewards are alike, so there is no update")
            return
        updates = []
        with step.phase("updating", "update", len(batch.mini_batches)) as phase:
            for i in range(len(batch.mini_batches)):
                lr = learning_rate(self.state.updates, self.recipe)
                updates.append(self.policy.update(i, lr))
                self.state.updates += 1
                phase.advance()
        step.log({name: sum(u[name] for u in updates) / len(updates) for name in updates[0]})
        step.log(nvme_metrics(updates, self.recipe, step.number))
        step.log({"optim/lr": lr} | self.policy.peak_memory())
        step.log({"optim/tflops": self.update_flops(batch) / 1e12 / step.metrics["time/update_s"]})

    def update_flops(self, batch: StepBatch) -> float:
        """A rank's part of what the model has to multiply and add for the updates of a batch, nothing counted twice."""
        assert self.inputs.work is not None  # of a model that is trained it is known
        lengths = (sample.model_tokens for part in batch.mini_batches for sample in part)
        whole = update_flops(self.inputs.work, lengths, adapter=self.recipe.model.lora is not None)
        return whole / self.recipe.trainer.parallel.ranks

    def evaluation_due(self) -> bool:
        every, last = self.recipe.eval.every, self.state.step == self.recipe.trainer.steps
        return bool(every and self.inputs.eval_prompts) and (self.state.step % every == 0 or last)

    def evaluate(self, step: Step) -> None:
        samples = len(self.inputs.eval_prompts) * self.recipe.eval.samples_per_prompt
        with step.phase("evaluating", "eval", samples) as phase:
            parts = (self.inputs.eval_prompts, self.engines, self.verifier, self.inputs.decode, self.recipe)
            with self.engines.drafts_apart():
                answers = attend(beside(lambda: evaluate(*parts, phase.advance)), self.mend)
        self.engines.forget_prefixes()  # a resumed run has not evaluated, and must sample the same
        shown = self.recipe.logging.samples_per_step
        self.run.log_evaluation(step.number, answers.records(self.inputs.decode, shown))
        scores = answers.summary()
        step.log(evaluation_metrics(scores, self.inputs.eval_task))
        self.eval_score = scores.avg

    def save_if(self, due: bool, timeout_s: float | None = None) -> None:
        if not due:
            return
        self.saved = self.state.step
        with self.report.phase("saving"):
            rest = partial(flight.save, self.under_way)
            self.turns.to_trainer()
            self.saver.save(self.state.step, rest, asdict(self.state), self.eval_score, timeout_s)
        self.report.refresh()

    @contextlib.contextmanager
    def saved_if_cut_short(self) -> Iterator[None]:
        """Ctrl-C or an error between two updates loses nothing: the last whole step is saved before the run ends."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self.saver.wait(time_left(SAVE_ON_EXIT_S))
            with contextlib.suppress(Exception):
                unsaved = self.state.settled and self.state.step != self.kept()
                if unsaved:
                    self.engines.kill()  # they may be sampling, or keep the trainer waiting in a sync
                    self.turns.to_trainer_for_good()
                self.save_if(unsaved, time_left(SAVE_ON_EXIT_S))
                self.saver.wait(time_left(SAVE_ON_EXIT_S))
            if isinstance(error, Interrupted) and self.state.step != self.kept():
                error.lost = "not every step could be saved"
            goes_on = f"goes on after step {self.kept()}" if self.kept() else "starts anew: nothing is saved yet"
            self.report.warn(f"cut short in step {self.state.step + 1}: --resume {goes_on}")
            raise

    def kept(self) -> int:
        """The step of the last complete checkpoint; 0: none."""
        latest = self.run.latest()
        return latest.step if latest else 0


def learning_rate(updates: int, recipe: Recipe) -> float:
    """Linear warm-up over `warmup_updates`, then constant. `updates`: those done before this one."""
    o = recipe.trainer.optimizer
    return o.lr * min(1.0, (updates + 1) / max(1, o.warmup_updates))


def rollout_metrics(rollout: Rollout, batch: StepBatch, step: int) -> dict[str, float]:
    """What sampling gave.

    Raises:
        StepError: dynamic sampling found no group to learn from, replay is asked for and no sample has its routes, or no
            environment could go on.
    """
    kept = rollout.samples
    if not kept:
        raise StepError(
            f"step {step}: all {rollout.dropped_groups} sampled groups have rewards that are all alike, so dynamic "
            "sampling has nothing to learn from: the prompts are solved, or too hard for this policy"
        )
    if batch.replay and batch.missing_rows and not batch.complete:
        raise StepError(
            f"step {step}: rollout.routing_replay is on, and not one sample came with the routes of all its tokens "
            f"({batch.missing_rows} rows are missing or invalid)"
        )
    error = standard_error(torch.tensor([[s.reward for s in g.samples] for g in rollout.groups]).mean(1))
    metrics = {
        "reward/mean": sum(s.reward for s in kept) / len(kept),
        "rollout/tokens": rollout.tokens,
        "rollout/tokens_per_s": rollout.tokens / rollout.generate_s,
        "rollout/truncated": rollout.truncated,
        "rollout/staleness": max(step - 1 - s.completion.version for s in kept),
        "rollout/continued": rollout.continued,
        "sampling/dropped_groups": rollout.dropped_groups,
        "verifier/timeouts": rollout.timeouts,
        "verifier/errors": rollout.errors,
    }
    metrics |= {} if error is None else {"reward/stderr": error}
    return (
        metrics
        | environment_metrics(rollout, step)
        | ({"replay/missing_rows": batch.missing_rows} if batch.replay else {})
    )


def environment_metrics(rollout: Rollout, step: int) -> dict[str, float]:
    """What became of a step's episodes; nothing without an environment. StepError where not one could go on."""
    if not rollout.episodes:
        return {}
    if rollout.environment_failures == rollout.episodes:
        raise StepError(
            f"step {step}: the environment failed in all {rollout.episodes} episodes, in the first with: "
            f"{rollout.environment_problem}"
        )
    return {
        "rollout/turns_mean": rollout.turns / rollout.episodes,
        "rollout/environment_s": rollout.environment_s / rollout.episodes,
        "rollout/environment_failures": rollout.environment_failures,
    }


def evaluation_metrics(scores: Evaluation, task: str) -> dict[str, float]:
    """avg@k, k the samples of a prompt, with the ends of its interval, which a single prompt does not have, and pass@k."""
    found = {
        eval_metric(task, "avg", scores.samples): scores.avg,
        eval_metric(task, "pass", scores.k): scores.pass_rate,
    }
    if scores.ci95:
        found |= {
            eval_metric(task, "low", scores.samples): scores.ci95[0],
            eval_metric(task, "high", scores.samples): scores.ci95[1],
        }
    return found


def draft_metrics(drafted: int, accepted: int, step: int, lost: bool = False) -> dict[str, float]:
    """What speculative decoding did. StepError if it did nothing, and no engine was lost, which takes its counts along."""
    if not drafted and lost:
        return {"rollout/drafted": 0}
    if not drafted:
        raise StepError(
            f"step {step}: rollout.speculative is on, and the engines drafted not one token; ngram drafts what repeats: "
            "give it a smaller options.prompt_lookup_min, or leave rollout.speculative out"
        )
    return {"rollout/drafted": drafted, "rollout/draft_acceptance": accepted / drafted}


def replay_metrics(scores: Scores, batch: StepBatch, step: int) -> dict[str, float]:
    """What the trainer has replayed, by its own count: StepError where the recipe asks for replay and it is nothing."""
    if not batch.replay:
        return {}
    if not scores.routes_total:
        raise StepError(f"step {step}: rollout.routing_replay is on, and the trainer has replayed nothing")
    return {
        "replay/rows": sum(s.model_tokens for part in batch.mini_batches for s in part),
        "replay/route_agreement": scores.routes_agree / scores.routes_total,
    }


def nvme_metrics(updates: Sequence[dict[str, float]], recipe: Recipe, step: int) -> dict[str, float]:
    """What a step's updates moved together; StepError where the recipe asks for a state on NVMe and it is nothing."""
    if recipe.trainer.optimizer.offload != "nvme":
        return {}
    moved = {name: sum(u[name] for u in updates) for name in ("nvme/read_bytes", "nvme/write_bytes", "nvme/seconds")}
    if not (moved["nvme/read_bytes"] and moved["nvme/write_bytes"]):
        raise StepError(f"step {step}: trainer.optimizer.offload is nvme, and the updates have moved no bytes")
    return moved


def parity_metrics(scores: Scores) -> dict[str, float]:
    """The gap between trainer and engine before the step's first update; a log-probability that is no number raises."""
    sampled = torch.ones(len(scores.logp), dtype=torch.bool)
    gap = logprob_gap(torch.from_numpy(scores.logp), torch.from_numpy(scores.logp_engine), sampled)
    return {
        "parity/abs_logprob_diff_mean": gap.mean,
        "parity/abs_logprob_diff_max": gap.max,
        "parity/mismatch_kl": gap.mismatch_kl,
    }


def check_agreement(gap: float, recipe: Recipe) -> None:
    """Before a process's first rollout: an engine that serves other weights than the trainer's shows here."""
    bound = logprob_mean_bound(recipe)
    if gap > bound:
        raise StepError(
            f"trainer and engine differ by {gap:.2e} in mean |Δlogp|, above {bound:g}: `beam-rl parity` says where; "
            "parity.logprob_mean_bound sets the bound"
        )


def sync_metrics(sync: SyncReport) -> dict[str, float]:
    return {
        "sync/seconds": sync.seconds,
        "sync/bytes": sync.bytes,
        "sync/buckets": sync.buckets,
        "sync/version": sync.version,
    }
