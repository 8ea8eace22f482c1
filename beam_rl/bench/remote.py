"""An object in a process of its own, whose methods are called one after the other through futures."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any


class Died(RuntimeError):
    """The object's process has ended."""


class Remote:
    """`make(*args)`, called there, gives the object; an error of its own fails every call."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, make, args), daemon=True)
        self.process.start()
        other.close()
        self._calls: deque[Future] = deque()
        self._lock = threading.Lock()
        self._has_died = False
        threading.Thread(target=self._collect, daemon=True).start()

    def call(self, method: str, *args: Any) -> Future:
        """Calls are answered in their order; those that are open when the process ends fail with `Died`."""
        call: Future = Future()
        with self._lock:
            if self._has_died:
                call.set_exception(Died("the process has died"))
                return call
            self._calls.append(call)
            with suppress(OSError):  # `_collect` sees the same end
                self._pipe.send((method, args))
        return call

    def stop(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.join()

    def _collect(self) -> None:
        try:
            while True:
                succeeded, answer = self._pipe.recv()
                with self._lock:
                    call = self._calls.popleft()
                call.set_result(answer) if succeeded else call.set_exception(answer)
        except (EOFError, OSError):
            with self._lock:
                self._has_died = True
            for call in self._calls:
                call.set_exception(Died("the process has died"))


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    made: Any = None
    failure: Exception | None = None
    try:
        made = make(*args)
    except Exception as error:
        failure = error
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if failure is not None:
                raise failure
            pipe.send((True, getattr(made, method)(*arguments)))
        except Exception as error:
            pipe.send((False, error))
