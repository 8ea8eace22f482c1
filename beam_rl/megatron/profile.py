"""What a trainer rank does in a step, as a trace and a table; and the names that its parts have there and under Nsight."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

ROWS, NAME_COLUMNS = 60, 80  # of the table


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """Names what runs inside, for this package's traces and as an NVTX range."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(record_function(name))
        if torch.cuda.is_available():
            stack.enter_context(torch.cuda.nvtx.range(name))
        yield


class Trace:
    """Records from its making until `write`, what this process's CPU threads and GPU do."""

    def __init__(self) -> None:
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)
        self._profile.start()

    def write(self, path: Path) -> None:
        """To a JSON file for Perfetto or chrome://tracing, and beside it a .txt of what took longest, the step's parts
        among it. OSError if the disk does not take it."""
        self._profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".txt").write_text(self._table(), encoding="utf-8")
        partial = path.with_name(path.name + ".partial")
        try:
            self._profile.export_chrome_trace(str(partial))
            os.replace(partial, path)  # a full disk shows here: what writes the file does not tell
        finally:
            partial.unlink(missing_ok=True)

    def _table(self) -> str:
        """On a GPU by the GPU's own time, kernel by kernel; then by the CPU's, which is what a small model waits for."""
        totals, where = self._profile.key_averages(), ["cuda"] if torch.cuda.is_available() else []
        tables = [
            totals.table(f"self_{device}_time_total", row_limit=ROWS, max_name_column_width=NAME_COLUMNS)
            for device in (*where, "cpu")
        ]
        return "\n".join(tables)
