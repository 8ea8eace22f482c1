"""The process that grades: reads one JSON object a line, answers each with one line, until its input closes.

Started by `pool.py` as `python -m beam_rl.verifiers.worker BYTES SECONDS`: the most address space it may take, and the
CPU seconds after which the system ends it should nobody be left to kill it. Imports neither torch nor transformers.
"""

import json
import math
import os
import resource
import sys


def main(memory_bytes: int, cpu_s: float) -> None:
    """Prints `ready`, then one verdict for each {"gold", "answer"}."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not be taken for a verdict
    from beam_rl.verifiers.math import math_equal

    math_equal("x + 1/2", "0.5 + x")  # the first answer must not pay for the parser's tables
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", file=replies)
    for line in sys.stdin:
        # A worker deep in a computation sees neither a closed pipe nor a Python signal; this limit it can't miss.
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(used.ru_utime + used.ru_stime + cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        item = json.loads(line)
        error = None
        right = False
        try:
            right = math_equal(item["gold"], item["answer"])
        except Exception as exception:  # whatever a strange answer does to the parser: it is not right
            error = f"{type(exception).__name__}: {str(exception)[:200]}"
        print(json.dumps({"right": right, "error": error}), file=replies)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
