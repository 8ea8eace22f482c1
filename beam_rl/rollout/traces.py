"""What an engine's workers do in some of its steps, as traces and tables: vLLM's profiler writes them, and they are brought
to where they belong. A trace that fails is told of and costs the engine nothing.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from beam_rl.rollout.launch import EngineSettings
from beam_rl.rollout.sync.transport import reason


class Traces:
    """Of one engine, whose settings say `traces`."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.prefix = f"{settings.name}_trace"  # of the files that vLLM leaves in the folder of logs

    async def begin(self, llm: Any, engine_steps: int) -> str | None:
        """Has vLLM's `AsyncLLM` record its next steps, so many. Returns what kept it from that, if anything did."""
        try:
            for old in self._files():
                old.unlink()  # of a step that was not taken to its end
            await llm.start_profile(self.prefix, max_iterations=engine_steps)
        except Exception as error:
            return f"it did not begin: {reason(error)}"
        return None

    async def end(self, llm: Any, path: str) -> str | None:
        """Brings the trace, for Perfetto, to PATH.json and the table of what took longest to PATH.txt; of several workers
        each to PATH_WORKER, by vLLM's name of it. Returns what kept one from being there, if anything did.
        """
        workers = self.settings.parallel.workers
        try:
            await llm.stop_profile()
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            whole = [file for file in self._files() if file.suffix == ".json" and _is_whole(file)]
            for trace in whole:
                worker = trace.name.partition(".")[0]
                to = path + worker.removeprefix(self.prefix) if workers > 1 else path
                table = trace.with_name(f"{worker}.profiler_out.txt")
                shutil.move(trace, f"{to}.json")
                if table.exists():  # vLLM fails at some
                    shutil.move(table, f"{to}.txt")
            for rest in self._files():
                rest.unlink()
        except Exception as error:
            return f"{path}.json could not be written: {reason(error)}"
        if len(whole) < workers:
            return (
                f"{path}.json: {workers - len(whole)} of {workers} traces are missing; {self.settings.log} may say why"
            )
        return None

    def _files(self) -> list[Path]:
        return sorted(Path(self.settings.log_dir).glob(f"{self.prefix}_*.*"))


def _is_whole(trace: Path) -> bool:
    """Whether its JSON ends as it should: a full disk cuts it off without a word."""
    with trace.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
        return file.read().rstrip().endswith(b"}")
