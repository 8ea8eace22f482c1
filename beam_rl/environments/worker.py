"""The process that environments come from: it loads the class once and forks for each response.

So one that hangs, dies or fills its memory takes no other one along, and what a module imports is imported once. Started by
`pool.py` as `python -m beam_rl.environments.worker FD BYTES NAME OPTIONS`: its end of a socket, the address space that an
environment may take, the class, its keyword arguments as JSON. Imports neither torch nor transformers by itself.
"""

import contextlib
import ctypes
import inspect
import json
import math
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from beam_rl.verifiers.worker import address_space, find, one_line

OURS = {"second_try": "beam_rl.environments.second_try:SecondTry"}
LIBC = ctypes.CDLL(None)
DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
Make = Callable[[Mapping[str, Any]], Any]
Step = Callable[[str, str | None], Any]  # a response, and the string that ended it, None where a token did


def main(control: socket.socket, memory_bytes: int, name: str, options: Mapping[str, Any]) -> None:
    """Says {stop_strings}, or {error} and ends; then forks for each number and socket, and kills for each number alone."""
    try:
        make, stop_strings = load(name, options)
    except Exception as error:
        control.send(json.dumps({"error": one_line(error)}).encode())
        return
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control.send(json.dumps({"stop_strings": stop_strings}).encode())
    forks: dict[int, int] = {}  # the driver's number → process
    numbers: dict[int, int] = {}  # the other way round
    while True:
        message, sockets, *_ = socket.recv_fds(control, 32, 1)
        for pid in ended():
            forks.pop(numbers.pop(pid, -1), None)
        if not message:
            break
        if sockets:
            with socket.socket(fileno=sockets[0]) as channel:
                if pid := fork(channel, control, make):
                    forks[int(message)], numbers[pid] = pid, int(message)
        elif int(message) in forks:
            kill(forks[int(message)])
    for pid in forks.values():
        kill(pid)


def ended() -> Iterator[int]:
    """Processes that have ended; what they had started is killed while the group still has their number."""
    with contextlib.suppress(ChildProcessError):  # there are none at all
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            kill(found.si_pid)
            os.waitpid(found.si_pid, 0)
            yield found.si_pid


def load(name: str, options: Mapping[str, Any]) -> tuple[Make, list[str]]:
    """What makes an environment of a row, and the strings that end a turn of the model's.

    Raises whatever its module raises; TypeError where it is no environment.
    """
    made = find(OURS.get(name, name))
    inspect.signature(made).bind({}, **options)
    if not callable(getattr(made, "step", None)):
        raise TypeError(f"{made.__name__} has no method step(response)")
    stops = getattr(made, "stop_strings", ())
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) and text for text in stops):
        raise TypeError(
            f"{made.__name__}.stop_strings = {stops!r:.80}: a list of texts, none of them empty, is expected"
        )
    return lambda row: made(row, **options), list(stops)


def fork(channel: socket.socket, control: socket.socket, make: Make) -> int:
    """A process that serves one response's environment; its number, 0: there is no room for another process."""
    parent = os.getpid()
    try:
        if pid := os.fork():
            return pid
    except OSError as error:
        with contextlib.suppress(OSError):
            channel.sendall(json.dumps({"error": f"no process could be started for it: {error}"}).encode() + b"\n")
        return 0
    try:
        os.setsid()  # so that what an environment starts can be killed with it
        LIBC.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() == parent:
            control.close()
            serve(channel, make)
    finally:
        os._exit(0)


def serve(channel: socket.socket, make: Make) -> None:
    """Reads {row, seed}, then {response, ended_by} a line; writes {answer, reward} for each, or {error} and ends."""
    lines, replies = channel.makefile("r", encoding="utf-8"), channel.makefile("w", encoding="utf-8")
    try:
        begin = json.loads(lines.readline())
        random.seed(begin["seed"])
        environment = make(begin["row"])
        step = step_of(environment)
        for line in lines:
            turn = json.loads(line)
            answer, reward = checked(step(turn["response"], turn["ended_by"]))
            print(json.dumps({"answer": answer, "reward": reward}), file=replies, flush=True)
    except Exception as error:
        with contextlib.suppress(OSError):
            print(json.dumps({"error": one_line(error)}), file=replies, flush=True)
        return
    if callable(close := getattr(environment, "close", None)):
        close()


def step_of(environment: Any) -> Step:
    """The environment's `step`, which may leave out the parameter that says what ended the turn."""
    own = environment.step
    try:
        inspect.signature(own).bind("", None)
    except TypeError:
        return lambda response, ended_by: own(response)
    return own


def checked(reply: Any) -> tuple[str | None, float | None]:
    """What an environment's step returned, if that is an answer."""
    if not isinstance(reply, tuple) or len(reply) != 2:
        raise TypeError(f"step returned {reply!r:.80}, not (answer or None, reward or None)")
    answer, reward = reply
    if answer is not None and not isinstance(answer, str):
        raise TypeError(f"an answer of type {type(answer).__name__}, not a text")
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"a reward of {reward}")
    return answer, None if reward is None else float(reward)


def kill(pid: int) -> None:
    """The process and what it has started."""
    for end in (os.killpg, os.kill):  # the latter for one that has no group yet
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
