"""A trainer scores as transformers does, learns the same however the batch is split, and resumes as if nothing was."""

import contextlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from beam_rl.algorithms.losses import LossInputs, TokenLoss
from beam_rl.errors import InputError
from beam_rl.megatron.checkpoint_files import IndexUnpickler, Reader
from beam_rl.recipe.tree import Optimizer, Parallel
from beam_rl.samples import MicroBatch

LENGTHS = [12, 30, 5, 22, 9, 17]
LR = 1e-3


def one_by_one(lengths: list[int] = LENGTHS) -> list[MicroBatch]:
    return [tiny.micro_batch([n], seed=i) for i, n in enumerate(lengths)]


def weights(trainer: tiny.Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.hf_tensors()}


def gradients(trainer: tiny.Trainer) -> dict[str, Tensor]:
    return {name: p.main_grad.clone() for name, p in trainer.model.named_parameters()}


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor], relative: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        error = (ours[name].double() - expected.double()).norm()
        assert error <= relative * expected.double().norm(), f"{name}: {error / expected.double().norm():.2g}"


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_the_log_probabilities_and_entropies_of_transformers(temperature: float) -> None:
    batches = [tiny.micro_batch(LENGTHS[:3], routes=False), tiny.micro_batch(LENGTHS[3:], seed=9, routes=False)]
    reference = tiny.reference_model()
    for batch, score in zip(
        batches, tiny.trainer(temperature=temperature, chunk_tokens=16).score(batches), strict=True
    ):
        samples = np.split(batch.tokens, batch.cu_tokens[1:-1])
        logits = torch.cat([reference(torch.tensor(s)[None]).logits[0] for s in samples])
        expected = (logits / temperature).log_softmax(-1)
        chosen = expected.gather(-1, torch.tensor(batch.targets)[:, None]).squeeze(-1)
        assert score.logp.dtype == score.entropy.dtype == np.float32
        np.testing.assert_allclose(score.logp, chosen, rtol=0, atol=1e-5)
        np.testing.assert_allclose(score.entropy, -(expected.exp() * expected).sum(-1), rtol=0, atol=1e-5)


def test_scoring_leaves_no_trace_in_the_weights_and_no_samples_give_no_scores() -> None:
    trainer = tiny.trainer()
    before = weights(trainer)
    trainer.score(one_by_one())
    assert trainer.score([]) == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_an_update_does_not_depend_on_the_micro_batches() -> None:
    singles = one_by_one()
    split_metrics: list[dict[str, float]] = []
    results = []
    for batches in ([tiny.join(singles)], [tiny.join(singles[:1]), tiny.join(singles[1:])], singles):
        trainer = tiny.trainer()
        split_metrics.append(trainer.update(batches, tiny.squared_objective, LR))
        results.append(gradients(trainer))
    for metrics, gradient in zip(split_metrics[1:], results[1:], strict=True):
        assert_near(gradient, results[0], 2e-6)
        assert metrics == pytest.approx(split_metrics[0], rel=1e-5)


def test_an_update_follows_the_gradient_of_the_weighted_loss() -> None:
    """Metrics and direction, from the scores before and after: nothing of the trainer's own bookkeeping."""
    trainer, batch = tiny.trainer(), tiny.micro_batch(LENGTHS)

    def loss_of(score: Any) -> tuple[float, TokenLoss]:
        fields = ("logp_old", "logp_engine", "logp_reference", "advantage", "response", "sample")
        given = {name: torch.tensor(getattr(batch, name)) for name in fields}
        token = tiny.squared_objective(LossInputs(logp=torch.tensor(score.logp), **given))
        return float((torch.tensor(batch.weight) * token.loss).sum()), token

    before = trainer.score([batch])[0]
    loss, token = loss_of(before)
    metrics = trainer.update([batch], tiny.squared_objective, 1e-4)
    assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-5)
    assert metrics["loss/entropy"] == pytest.approx(before.entropy[batch.response].mean(), rel=1e-5)
    assert metrics["loss/clip_fraction"] == pytest.approx(float(token.clipped[batch.response].float().mean()))
    assert token.kl is not None
    assert metrics["loss/kl"] == pytest.approx(float(token.kl[batch.response].mean()), rel=1e-5)
    assert loss_of(trainer.score([batch])[0])[0] < loss


def test_norms_and_gate_biases_do_not_decay() -> None:
    trainer = tiny.trainer()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    batch = tiny.micro_batch([6])
    still = tiny.replace(batch, weight=np.zeros_like(batch.weight))
    metrics = trainer.update([still], tiny.squared_objective, lr=0.5)
    assert metrics["optim/grad_norm"] == 0
    for name, parameter in trainer.model.named_parameters():
        factor = 1.0 if parameter.ndim == 1 else 1 - 0.5 * 0.1
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_a_weight_changes(value: float) -> None:
    trainer, batch = tiny.trainer(), tiny.micro_batch([6, 8])
    before = weights(trainer)
    assert batch.logp_old is not None
    logp_old = batch.logp_old.copy()
    logp_old[4] = -value
    with pytest.raises(FloatingPointError, match="the loss is .*; the weights are as they were"):
        trainer.update([tiny.replace(batch, logp_old=logp_old)], tiny.squared_objective, LR)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    trainer.update([batch], tiny.squared_objective, LR)  # and the next update is clean
    assert all(bool(tensor.isfinite().all()) for tensor in weights(trainer).values())


def test_a_gradient_that_is_not_finite_stops_too() -> None:
    def steep(inputs: LossInputs) -> TokenLoss:  # sqrt has an infinite slope at 0
        loss = (inputs.logp - inputs.logp.detach()).clamp(min=0).sqrt()
        return TokenLoss(loss=loss, clipped=torch.zeros_like(inputs.response), kl=None)

    trainer = tiny.trainer()
    before = weights(trainer)
    with pytest.raises(FloatingPointError, match="a gradient is not finite"):
        trainer.update([tiny.micro_batch([6])], steep, LR)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_reference_stays_the_checkpoint_while_the_policy_learns(precision: str) -> None:
    trainer, batches = tiny.trainer(precision=precision), [tiny.micro_batch(LENGTHS)]
    start = trainer.score(batches)[0].logp
    trainer.update(batches, tiny.squared_objective, LR)
    learned = trainer.score(batches)[0].logp
    assert np.abs(learned - start).max() > 1e-3
    for _ in range(2):  # the first loads the checkpoint, the second has it
        np.testing.assert_array_equal(trainer.score_reference(batches)[0].logp, start)
        np.testing.assert_array_equal(trainer.score(batches)[0].logp, learned)


# --- several processes ------------------------------------------------------------------------------------


def train(
    precision: str, steps: range, load: Path | None = None, save: Path | None = None
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Runs in a process of its own: the weights after updates `steps` and their metrics."""
    trainer = tiny.trainer(precision=precision, deterministic=True)
    if load is not None:
        trainer.load(load)
    metrics = [trainer.update([tiny.micro_batch([14, 9], seed=s)], tiny.squared_objective, LR) for s in steps]
    if save is not None:
        trainer.save(save)
    out = {name: tensor.float().numpy() for name, tensor in trainer.hf_tensors()}
    trainer.close()
    return out, metrics


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_trainer_continues_bit_for_bit(precision: str, tmp_path: Path) -> None:
    saved = tmp_path / "state"
    (straight, straight_metrics), _ = tiny.in_new_processes(
        train, (precision, range(4)), (precision, range(2), None, saved)
    )
    ((resumed, resumed_metrics),) = tiny.in_new_processes(train, (precision, range(2, 4), saved))
    assert resumed_metrics == straight_metrics[2:]
    assert all(np.array_equal(resumed[name], straight[name]) for name in straight)


def test_what_is_no_checkpoint_of_this_model_is_refused(tmp_path: Path) -> None:
    trainer = tiny.trainer()
    with pytest.raises(ValueError, match="holds no complete trainer checkpoint"):
        trainer.load(tmp_path)
    bf16 = tiny.trainer(precision="bf16")
    trainer.save(tmp_path / "fp32")
    with pytest.raises(ValueError, match="fp32 is not a checkpoint of this model: optimizer.main.*found nothing"):
        bf16.load(tmp_path / "fp32")


def update_rank(rank: int, world: int, master: str) -> tuple[dict[str, float], dict[str, Any], int]:
    """One of `world` ranks: its share of the samples, the gradients after the sum, the agreement of the first score."""
    optimizer = Optimizer(lr=LR, weight_decay=0.1, distributed=False)  # so that each rank has all of the sum
    settings = tiny.settings(parallel=Parallel(dp=world), optimizer=optimizer)
    trainer = tiny.Trainer(str(tiny.checkpoint()), settings, rank, world, master)
    mine = one_by_one()[:2] if rank == 0 else [tiny.join(one_by_one()[2:])]
    metrics = trainer.update(mine, tiny.squared_objective, LR)
    gradient = {name: tensor.numpy() for name, tensor in gradients(trainer).items()}
    idle = trainer.update(mine if rank == 0 else [], tiny.squared_objective, LR)
    assert idle["optim/grad_norm"] > 0
    trainer.close()
    return metrics, gradient, len(mine)


def test_two_ranks_learn_what_one_learns() -> None:
    master = tiny.meeting_point()
    (first, gradient, _), (second, other_gradient, _) = tiny.in_new_processes(
        update_rank, (0, 2, master), (1, 2, master)
    )
    alone = tiny.trainer()
    expected = alone.update(one_by_one(), tiny.squared_objective, LR)
    assert first == second == pytest.approx(expected, rel=1e-5)
    assert all(np.array_equal(gradient[name], other_gradient[name]) for name in gradient)
    assert_near({name: torch.tensor(g) for name, g in gradient.items()}, gradients(alone), 2e-6)


def test_ranks_must_be_as_many_as_the_recipe_says() -> None:
    with pytest.raises(ValueError, match="dp · tp · cp · pp = 2 · 1 · 1 · 1, but there are 1 trainer ranks"):
        tiny.trainer(parallel=Parallel(dp=2))


@pytest.mark.parametrize("name", ["os.system", "os.getcwd", "load"])
def test_a_checkpoints_index_can_not_name_other_code(name: str) -> None:
    """A protocol-4 pickle may reach through an allowed module: `torch.serialization` imports os."""
    payload = pickle.PROTO + b"\x04" + b"\x8c\x13torch.serialization" + b"\x8c" + bytes([len(name)]) + name.encode()
    with pytest.raises(pickle.UnpicklingError, match="does not belong there"):
        IndexUnpickler(io.BytesIO(payload + b"\x93.")).load()


class Evil:
    """Unpickled, it writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def test_a_checkpoint_with_an_object_in_it_is_refused_and_not_unpickled(tmp_path: Path) -> None:
    """torch itself unpickles what the index calls bytes; ours refuses such an index before anything is read."""
    dcp.save({"optimizer.step": Evil(tmp_path / "mark")}, checkpoint_id=tmp_path / "evil", no_dist=True)
    step = torch.tensor(0)
    with pytest.raises(InputError, match="BytesStorageMetadata, which does not belong there"):
        Reader(tmp_path / "evil").read_metadata()
    assert not (tmp_path / "mark").exists()
    with contextlib.suppress(BaseException):
        dcp.load({"optimizer.step": step}, checkpoint_id=tmp_path / "evil", no_dist=True)
    assert (tmp_path / "mark").exists(), "the test is worth nothing if torch did not unpickle it"
