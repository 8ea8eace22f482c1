"""Processes that die with their owner, and what they print."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from beam_rl.rollout import process

CHILD = (
    "from beam_rl.rollout import process; process.follow_owner(); print('up', flush=True); import time; time.sleep(60)"
)
OWNER = f"""
import subprocess, sys, time
from beam_rl.rollout import process
process.own_children()
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_child_dies_with_a_killed_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    assert child.is_running()
    owner.kill()
    owner.wait()
    assert psutil.wait_procs([child], timeout=5)[1] == []


def test_end_kills_what_does_not_go_by_itself() -> None:
    stubborn = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.end([stubborn.pid, 2**22 + 1], grace_s=0.2)
    assert not psutil.pid_exists(stubborn.pid)


def test_output_of_this_process_and_its_children_lands_in_the_file(tmp_path: Path, capfd) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    with process.output_to(log):
        os.write(1, b"own\n")
        child = subprocess.Popen([sys.executable, "-c", "input(); print('late')"], stdin=subprocess.PIPE)
    os.write(1, b"outside\n")
    child.communicate(b"\n")
    assert log.read_text() == "before\nown\nlate\n"
    assert capfd.readouterr().out == "outside\n"
    assert process.last_lines(log, 2) == "own\nlate"
    assert process.last_lines(tmp_path / "none", 2) == ""
