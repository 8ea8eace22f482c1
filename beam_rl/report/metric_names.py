"""The one list of metric names, with each one's unit and meaning. A name that isn't here is an error.

metrics.jsonl, W&B and the console all use these names as they stand.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Unit = Literal["", "nats", "s", "bytes", "share", "count", "tokens/s", "TFLOP/s"]


@dataclass(frozen=True)
class Metric:
    unit: Unit
    meaning: str


# `<task>` stands for a task's name and `k` for the samples a prompt, as in eval/aime25/avg@8.
METRICS: dict[str, Metric] = {
    "reward/mean": Metric("", "mean reward of the kept samples"),
    "reward/stderr": Metric("", "its standard error, over prompts: 1.96 of them to each side are the 95 % interval"),
    "reward/shuffled": Metric("count", "samples whose reward was changed by verifier.shuffle"),
    "eval/<task>/avg@k": Metric("share", "mean score over k samples a prompt"),
    "eval/<task>/pass@k": Metric("share", "share of prompts that at least one of k samples solves"),
    "eval/<task>/low@k": Metric("share", "lower end of avg@k's 95 % interval, over prompts"),
    "eval/<task>/high@k": Metric("share", "upper end of it"),
    "parity/abs_logprob_diff_mean": Metric("nats", "mean |Δlogp|, trainer against engine, before the first update"),
    "parity/abs_logprob_diff_max": Metric("nats", "largest |Δlogp|, trainer against engine"),
    "parity/mismatch_kl": Metric("nats", "mean of r − log r − 1, r = trainer / engine"),
    "replay/rows": Metric("count", "token rows whose routes were replayed"),
    "replay/missing_rows": Metric("count", "token rows that came without routes"),
    "replay/route_agreement": Metric("share", "(token, layer) expert sets that the trainer's router would choose too"),
    "sync/seconds": Metric("s", "until every engine served the new weights"),
    "sync/bytes": Metric("bytes", "weights sent to the engines"),
    "sync/version": Metric("count", "version of the weights that every engine serves"),
    "sync/buckets": Metric("count", "buckets that the weights were sent in"),
    "time/step_s": Metric("s", "the whole step"),
    "time/generate_s": Metric("s", "sampling"),
    "time/verify_s": Metric("s", "verifying"),
    "time/score_s": Metric("s", "the trainer's log-probabilities before the update"),
    "time/update_s": Metric("s", "optimizer updates"),
    "time/sync_s": Metric("s", "weights to the engines"),
    "time/save_s": Metric("s", "training stood still to save, between the step before and this one"),
    "time/write_s": Metric("s", "the last checkpoint's way to the disk, during which training went on"),
    "time/eval_s": Metric("s", "evaluating, in the steps where that is due"),
    "time/turn_s": Metric("s", "engines handed shared GPUs to the trainer; the way back is in time/sync_s"),
    "time/hold_s": Metric("s", "until the engines were at rest for the weights"),
    "time/idle_s": Metric("s", "the trainer had nothing to do: sampling, verifying, waiting"),
    "rollout/tokens": Metric("count", "tokens sampled"),
    "rollout/tokens_per_s": Metric(
        "tokens/s", "tokens sampled a second of sampling; asynchronous: of the time since the last batch"
    ),
    "rollout/truncated": Metric("count", "responses cut off at the limit"),
    "rollout/staleness": Metric("count", "versions between the weights that sampled and those that train"),
    "rollout/continued": Metric("count", "responses that more than one version of the weights sampled"),
    "rollout/turns_mean": Metric("", "the model's turns in an episode with an environment"),
    "rollout/environment_s": Metric("s", "waiting for the environment in an episode, mean"),
    "rollout/environment_failures": Metric("count", "episodes whose environment raised, hung or died; score 0"),
    "rollout/engine_restarts": Metric("count", "engines that were lost and started anew"),
    "rollout/redone": Metric("count", "requests that an engine left undone and that were asked for again"),
    "rollout/drafted": Metric("count", "speculative decoding: tokens drafted for the engines to verify"),
    "rollout/draft_acceptance": Metric("share", "of these, taken"),
    "sampling/dropped_groups": Metric("count", "groups dropped because their rewards were all equal"),
    "verifier/timeouts": Metric("count", "responses whose verification ran out of time; score 0"),
    "verifier/errors": Metric("count", "responses that the verifier could not judge; score 0"),
    "loss/policy": Metric("", "Σ weight · token loss, mean over the step's updates"),
    "loss/clip_fraction": Metric("share", "response tokens where the clip was binding"),
    "loss/entropy": Metric("nats", "mean entropy of the policy at the response tokens"),
    "loss/kl": Metric("nats", "mean KL(policy ‖ reference) at the response tokens"),
    "optim/grad_norm": Metric("", "gradient norm before clipping, mean over the step's updates"),
    "optim/router_grad_norm": Metric(
        "", "the routers' part of the gradient norm; not with an adapter, which freezes them"
    ),
    "optim/skipped_updates": Metric("count", "mini-batches without an update: their advantages are all 0"),
    "optim/lr": Metric("", "learning rate of the step's last update"),
    "optim/tflops": Metric("TFLOP/s", "of a rank in the updates: the model's own multiplications and additions"),
    "memory/gpu_peak_bytes": Metric("bytes", "most GPU memory that a trainer rank held"),
    "memory/host_peak_bytes": Metric("bytes", "most host memory that a trainer rank held"),
    "turn/bytes": Metric("bytes", "copied between shared GPUs and where the trainer waits, since the step before"),
    "turn/seconds": Metric("s", "that this took, the slowest rank; with what a save or a check between the steps took"),
    "nvme/read_bytes": Metric("bytes", "read from NVMe in the step"),
    "nvme/write_bytes": Metric("bytes", "written to NVMe in the step"),
    "nvme/seconds": Metric(
        "s", "reading, updating and writing optimizer state in the step's updates, the slowest rank"
    ),
}


class UnknownMetric(KeyError):
    """A name that is not in METRICS."""

    def __str__(self) -> str:
        return str(self.args[0])


def metric(name: str) -> Metric:
    """The entry of a full name, `eval/aime25/avg@8` among them.

    Raises:
        UnknownMetric: with the nearest names that exist.
    """
    found = METRICS.get(_pattern(name))
    if found is None:
        near = difflib.get_close_matches(name, METRICS, n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UnknownMetric(f"metric {name!r} is not in beam_rl/report/metric_names.py{hint}")
    return found


def check_names(names: Iterable[str]) -> None:
    """Raises UnknownMetric at the first name that isn't listed."""
    for name in names:
        metric(name)


def eval_metric(task: str, which: Literal["avg", "pass", "low", "high"], k: int) -> str:
    """The name of an evaluation's metric, as eval/aime25/avg@8. A task's name holds no slash."""
    return f"eval/{task.replace('/', '-')}/{which}@{k}"


def format_value(name: str, value: float | None) -> str:
    """A value for people, in few characters: 12.3 s, 4.1 GB, 93.6 %, 8.1e-03. A missing one is a dash."""
    if value is None:
        return "–"
    unit = metric(name).unit
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    if unit == "count":
        return f"{value:,.0f}"
    if unit == "tokens/s":
        return f"{value:,.0f} tokens/s"
    if unit == "TFLOP/s":
        return f"{value:.3g} TFLOP/s"
    return _significant(value)


def format_seconds(value: float) -> str:
    """0.34 s, 12.3 s, 4 min 05 s, 2 h 03 min."""
    if value < 1:
        return f"{value:.2f} s"
    if value < 100:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_bytes(value: float) -> str:
    """Powers of ten, three digits: 512 B, 4.10 MB, 1.23 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _significant(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.3f}" if 0.01 <= abs(value) < 1000 else f"{value:.1e}"


def _pattern(name: str) -> str:
    return re.sub(r"^eval/[^/]+/(avg|pass|low|high)@\d+$", r"eval/<task>/\1@k", name)
