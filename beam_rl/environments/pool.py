"""Environments in processes that can be killed: one for each response, all forked from one that has loaded the class.

Promises an answer or an `EnvironmentFailure` within the time limit, whatever a user's class does; what failed is killed with
all that it started. Knows nothing about tokens or engines. Coroutines belong to one event loop, any.
"""

import asyncio
import contextlib
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

from beam_rl.errors import InputError
from beam_rl.verifiers.pool import MEMORY_BYTES, START_LIMIT_S, start_worker

MOST_CHARACTERS = 2**22  # of an answer
MOST_SAID = 2**16  # bytes, of what a process says once it has loaded the class
GRACE_S = 10.0  # for an environment to close
FILES = 65536  # open at most, where the system allows it: each environment has one


class EnvironmentFailure(Exception):
    """One response's environment raised, hung or died."""


class EnvironmentPool:
    """The process that environments are forked from, and the way to each of them."""

    def __init__(self, name: str, options: Mapping[str, Any], timeout_s: float = 10.0, workers: int = 8) -> None:
        """Returns when the class is loaded; InputError where it can't be. Arguments: as in the recipe."""
        self.name, self.options, self.timeout_s = name, options, timeout_s
        self.at_work = asyncio.Semaphore(workers)
        self._numbers = itertools.count()
        self._starting = threading.Lock()
        self._closed = False
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [str(theirs.fileno()), str(MEMORY_BYTES), self.name, json.dumps(self.options)]
            self._process = start_worker(
                "beam_rl.environments.worker", arguments, own_code=True, pass_fds=[theirs.fileno()]
            )
        self._control.settimeout(START_LIMIT_S)
        try:
            said = json.loads(self._control.recv(MOST_SAID) or '{"error": "the process died while it was loaded"}')
        except OSError as error:
            said = {"error": f"did not start ({error})"}
        if "error" in said:
            self._stop()
            raise InputError(f"environment.name = {self.name}: {said['error']}")
        self.stop_strings: tuple[str, ...] = tuple(said["stop_strings"])  # that end a turn of the model's

    async def begin(self, row: Mapping[str, Any], seed: int) -> "Remote":
        """An environment for one response; what its class raises shows in its first `step`. May raise EnvironmentFailure."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # each environment takes a file descriptor
            raise EnvironmentFailure(f"{error}; see `ulimit -Hn`") from None
        number = next(self._numbers)
        with theirs:
            try:
                self._fork(number, theirs)
            except OSError:
                await asyncio.to_thread(self._start_anew)
                self._fork(number, theirs)
        reader, writer = await asyncio.open_connection(sock=ours, limit=MOST_CHARACTERS)
        writer.write(json.dumps({"row": row, "seed": seed}, default=str).encode() + b"\n")
        return Remote(self, number, reader, writer)

    def _fork(self, number: int, channel: socket.socket) -> None:
        socket.send_fds(self._control, [str(number).encode()], [channel.fileno()])

    def _start_anew(self) -> None:
        """After its process was lost, and with it all environments; by the first who notices."""
        with self._starting:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
            if self._closed:
                raise RuntimeError("the run is ending")
            if self._process.poll() is not None:
                self._control.close()
                self._start()

    def kill(self, number: int) -> None:
        """Ends an environment that may have ended."""
        with contextlib.suppress(OSError):
            self._control.send(str(number).encode())

    def close(self) -> None:
        """Ends all of them; no other one begins."""
        self._closed = True
        with self._starting:
            self._stop()

    def _stop(self) -> None:
        self._control.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Remote:
    """One response's environment."""

    def __init__(
        self, pool: EnvironmentPool, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._pool, self._number, self._reader, self._writer = pool, number, reader, writer

    async def step(self, response: str, ended_by: str | None = None) -> tuple[str | None, float | None]:
        """The environment's answer, None: it is over, and its reward, if any. Raises EnvironmentFailure.

        ended_by: the stop string that ended the model's turn; None: one of the model's stop tokens.
        """
        async with self._pool.at_work:
            try:
                async with asyncio.timeout(self._pool.timeout_s):
                    self._writer.write(json.dumps({"response": response, "ended_by": ended_by}).encode() + b"\n")
                    line = await self._reader.readline()
            except TimeoutError:
                self._fail(f"no answer within {self._pool.timeout_s:g} s")
            except ValueError:
                self._fail(f"an answer of more than {MOST_CHARACTERS} characters")
            except OSError:
                line = b""
        if not line.endswith(b"\n"):
            self._fail("its process died")
        reply = json.loads(line)
        if "error" in reply:
            self._fail(reply["error"])
        return reply["answer"], reply["reward"]

    def _fail(self, why: str) -> NoReturn:
        self._pool.kill(self._number)
        self._writer.close()
        raise EnvironmentFailure(why)

    def end(self) -> None:
        """Lets it close, for a while."""
        self._writer.close()
        asyncio.get_running_loop().call_later(GRACE_S, self._pool.kill, self._number)
