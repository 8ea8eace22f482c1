"""The process that grades: reads one JSON list a line, answers each with one line, until its input closes.

Started by `pool.py` as `python -m beam_rl.verifiers.worker BYTES SECONDS [FUNCTION]`: the most address space it may take,
the CPU seconds after which the system ends it should nobody be left to kill it, and a user's function. Imports neither
torch nor transformers by itself.
"""

import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Grade = Callable[..., float]


def main(memory_bytes: int, cpu_s: float, function: str | None = None) -> None:
    """Prints `ready`, or why it can't start, then one verdict for each list of arguments."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not be taken for a verdict
    try:
        grade, used_bytes = (load(function), address_space()) if function else (_mathematics(), 0)
    except Exception as error:
        print(one_line(error), file=replies)
        return
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", file=replies)
    for line in sys.stdin:
        # A worker deep in a computation sees neither a closed pipe nor a Python signal; this limit it can't miss.
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(used.ru_utime + used.ru_stime + cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        problem, score = None, 0.0
        try:
            score = float(grade(*json.loads(line)))
            if not 0 <= score <= 1:  # not a number included
                raise ValueError(f"a score of {score}, which is not between 0 and 1")
        except Exception as exception:  # whatever a strange answer does to the parser: it is not right
            problem, score = one_line(exception), 0.0
        print(json.dumps({"score": score, "error": problem}), file=replies)


def load(function: str) -> Grade:
    """A user's function (response, gold answer, finish reason) → score from 0 to 1, of `module:name` or `FILE.py:name`.

    Raises as `find`, and TypeError for one that does not take three arguments.
    """
    found = find(function)
    inspect.signature(found).bind("", "", "")
    return found


def find(name: str) -> Any:
    """What a user's `module:name` or `FILE.py:name` names.

    Raises whatever its module raises; ImportError or AttributeError where there is none.
    """
    where, _, name = name.rpartition(":")
    if where.endswith(".py"):
        file = Path(where).expanduser().resolve()
        spec = importlib.util.spec_from_file_location(f"own_{file.stem}", file)
        if spec is None or spec.loader is None or not file.is_file():
            raise ImportError(f"no file {where}")
        sys.path.append(str(file.parent))  # for its neighbours
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module  # which data classes and pickle look up
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    return getattr(module, name)


def _mathematics() -> Grade:
    from beam_rl.verifiers.math import math_equal

    math_equal("x + 1/2", "0.5 + x")  # the first answer must not pay for the parser's tables
    return math_equal


def address_space() -> int:
    """Bytes that this process has mapped, by the libraries that a user's module imports."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {str(error)[:200]}".split())


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
