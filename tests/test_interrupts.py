"""SIGTERM and Ctrl-C: when they interrupt, what they wait for, and that a second one ends at once."""

import subprocess
import sys
import time

import psutil
import pytest

PROGRAM = """
import os, signal, subprocess, sys, time
from beam_rl import interrupts
interrupts.install(grace_s={grace_s})
child = subprocess.Popen(["sleep", "100"])
print(child.pid, flush=True)
try:
    with interrupts.held():
        print("held", flush=True)
        end = time.monotonic() + {held_s}
        while time.monotonic() < end:
            time.sleep(0.01)
        print("whole", flush=True)
    print("free", flush=True)
    time.sleep(100)
except interrupts.Interrupted as error:
    error.lost = "" if {kept} else "a step"
    print("interrupted by", error, round(interrupts.time_left(99)), flush=True)
    if {linger}:
        time.sleep(100)
    child.kill()
    sys.exit(error.exit_code)
"""


def start(held_s: float = 1.0, grace_s: float = 25.0, kept: bool = True, linger: bool = False) -> subprocess.Popen[str]:
    code = PROGRAM.format(held_s=held_s, grace_s=grace_s, kept=kept, linger=linger)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_until(process: subprocess.Popen[str], word: str) -> list[str]:
    lines: list[str] = []
    assert process.stdout
    while not lines or not lines[-1].startswith(word):
        line = process.stdout.readline()
        assert line, lines
        lines.append(line.strip())
    return lines


@pytest.mark.parametrize(("signum", "code"), [(15, 0), (2, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_the_first_signal_waits_for_what_must_not_be_cut(signum: int, code: int) -> None:
    process = start()
    lines_until(process, "held")
    process.send_signal(signum)
    out, _ = process.communicate(timeout=30)
    name = {15: "SIGTERM", 2: "SIGINT"}[signum]
    # 20 of the 25 s are for saving, of which one is gone.
    assert out.splitlines() == ["whole", f"interrupted by {name} 19"]
    assert process.returncode == code


def test_outside_it_interrupts_at_once_and_a_loss_is_no_success() -> None:
    process = start(held_s=0, kept=False)
    lines_until(process, "free")
    process.send_signal(15)
    out, _ = process.communicate(timeout=30)
    assert out.strip() == "interrupted by SIGTERM 20" and process.returncode == 1


def test_waiting_ends_with_the_grace_time() -> None:
    process = start(held_s=60, grace_s=1)
    lines_until(process, "held")
    process.send_signal(15)
    asked = time.monotonic()
    out, _ = process.communicate(timeout=30)
    assert out.strip() == "interrupted by SIGTERM 0" and 0.5 < time.monotonic() - asked < 10


def test_the_second_signal_ends_the_process_and_all_it_has_started() -> None:
    process = start(held_s=60)
    child = int(lines_until(process, "held")[0])
    process.send_signal(15)
    time.sleep(0.2)
    process.send_signal(2)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130 and "ended at once" in err
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_signal_that_comes_twice_at_once_is_one() -> None:
    process = start()
    lines_until(process, "held")
    process.send_signal(15)
    time.sleep(0.05)
    process.send_signal(15)
    out, _ = process.communicate(timeout=30)
    assert out.splitlines() == ["whole", "interrupted by SIGTERM 19"] and process.returncode == 0


def test_the_second_signal_ends_it_also_while_it_is_ending() -> None:
    process = start(held_s=0, linger=True)
    lines_until(process, "free")
    process.send_signal(2)
    lines_until(process, "interrupted")
    process.send_signal(15)
    assert process.wait(timeout=10) == 143
