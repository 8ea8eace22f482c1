"""Turns on shared GPUs: who makes room when. Trainer and engines are scripted; the order of the calls is the point."""

import contextlib
from types import SimpleNamespace

import pytest

from beam_rl.loop import Loop, State
from beam_rl.policy import Copied
from beam_rl.step import Quiet, Step
from beam_rl.sync import SyncReport
from beam_rl.turns import Turns


class Scripted:
    """Trainer, engines, saver and run in one: it writes down what it is asked for."""

    def __init__(self, alive: bool = True) -> None:
        self.alive, self.calls = alive, []

    def put_on_gpu(self, what: str) -> Copied:
        self.calls.append(f"trainer: {what}")
        return Copied(1, 0.25)

    def all_alive(self) -> bool:
        return self.alive

    def each(self, method: str, *args: str) -> None:
        self.calls.append(" ".join(("engines:", method, *args)))

    def kill(self) -> None:
        self.calls.append("engines: kill")

    def save(self, *args: object) -> None:
        self.calls.append("save")

    def wait(self, timeout_s: float) -> None: ...

    def latest(self) -> None: ...

    def warn(self, message: str) -> None: ...

    @contextlib.contextmanager
    def phase(self, name: str):
        yield


def test_the_gpus_change_hands_step_by_step() -> None:
    both = Scripted()
    turns = Turns(both, both, shared=True)
    turns.to_trainer()
    with turns.to_engines():
        both.calls.append("sync")
    assert both.calls == [
        "engines: sleep", "trainer: all", "engines: sleep", "trainer: weights", "engines: wake weights", "sync",
        "trainer: nothing", "engines: wake kv_cache",
    ]  # fmt: skip


def test_an_engine_that_starts_anew_finds_room() -> None:
    both = Scripted(alive=False)
    with Turns(both, both, shared=True).to_engines():
        pass
    assert both.calls[:3] == ["trainer: nothing", "engines: sleep", "trainer: weights"]


@pytest.mark.parametrize("fails", ["engines: wake weights", "trainer: nothing"])
def test_a_hand_over_that_fails_half_way_leaves_the_trainer_able_to_save(fails: str) -> None:
    class Failing(Scripted):
        def put_on_gpu(self, what: str) -> Copied:
            copied = super().put_on_gpu(what)
            if self.calls[-1] == fails:
                raise OSError("half-way")
            return copied

        def each(self, method: str, *args: str) -> None:
            super().each(method, *args)
            if self.calls[-1] == fails:
                raise OSError("half-way")

    both = Failing()
    turns = Turns(both, both, shared=True)
    turns.to_trainer()
    with pytest.raises(OSError, match="half-way"), turns.to_engines():
        pass
    turns.to_trainer_for_good()
    assert both.calls[-1] == "trainer: all"


def test_nothing_moves_where_nothing_is_shared() -> None:
    both = Scripted()
    turns = Turns(both, both, shared=False)
    turns.to_trainer()
    turns.to_trainer_for_good()
    with turns.to_engines():
        pass
    assert not both.calls


def test_a_steps_row_has_what_its_turns_have_copied_and_no_other_steps() -> None:
    both = Scripted()
    turns = Turns(both, both, shared=True)
    loop = Loop.__new__(Loop)
    synced = SyncReport(seconds=1.0, bytes=2, buckets=1, version=0)
    vars(loop).update(
        turns=turns, rollouts=SimpleNamespace(hold=lambda: None), weights=SimpleNamespace(bring=lambda step: synced)
    )
    rows = []
    for number in range(3):
        if number:
            turns.to_trainer()
        step = Step(number, Quiet())
        loop.sync(step)
        rows.append((step.metrics["turn/bytes"], step.metrics["turn/seconds"]))
    assert rows == [(2, 0.5), (3, 0.75), (3, 0.75)]  # after the start only the sync's two moves
    vars(loop).update(turns=Turns(both, both, shared=False))
    loop.sync(step := Step(3, Quiet()))
    assert "sync/bytes" in step.metrics and not [name for name in step.metrics if name.startswith("turn/")]


@pytest.mark.parametrize(("wait_in", "shared", "told"), [("nvme", False, 1), ("nvme", True, 0), ("host", False, 0)])
def test_a_run_that_asks_for_nvme_and_shares_no_gpu_says_so(wait_in: str, shared: bool, told: int) -> None:
    both, said = Scripted(), []
    loop = Begun.__new__(Begun)
    vars(loop).update(
        recipe=SimpleNamespace(trainer=SimpleNamespace(wait_in=wait_in)), turns=Turns(both, both, shared),
        report=SimpleNamespace(warn=said.append), run=SimpleNamespace(resumed=None),
        state=State(unreported=None), rollouts=SimpleNamespace(go_on=lambda step: None),
    )  # fmt: skip
    loop.begin()
    assert len(said) == told and all("trainer.wait_in = nvme does nothing here" in line for line in said)


class Begun(Loop):
    """Whose first sync is somebody else's test."""

    def sync(self, step: Step) -> None: ...

    def check_engines(self) -> None: ...


@pytest.mark.parametrize(("last_row", "reported"), [(2, False), (3, True)])
def test_a_step_whose_row_was_written_just_before_the_run_was_cut_short_is_reported(
    last_row: int, reported: bool
) -> None:
    loop = Loop.__new__(Loop)
    vars(loop).update(state=State(step=3, unreported={"loss/policy": 0.5}), run=SimpleNamespace(last_step=last_row))
    assert loop.reported() == reported


def test_a_run_cut_short_while_engines_sample_does_not_wait_for_them_to_save() -> None:
    all_of_it = Scripted()
    loop = Loop.__new__(Loop)
    vars(loop).update(
        turns=Turns(all_of_it, all_of_it, shared=True), engines=all_of_it, saver=all_of_it, run=all_of_it, report=all_of_it,
        state=State(step=3), under_way=[], eval_score=None, recipe=SimpleNamespace(),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt), loop.saved_if_cut_short():
        raise KeyboardInterrupt
    assert all_of_it.calls == ["engines: kill", "trainer: all", "save"]
