"""Speculative decoding: how many tokens were drafted for the engine to verify, and how many of them it took.

A stat logger of vLLM's, which has these numbers step by step; nothing else of what it reports is kept.
"""

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class DraftCounter(StatLoggerBase):
    """Counts from the engine's start, of all its data-parallel workers."""

    drafted = accepted = 0

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        """vLLM calls the object itself as what makes a logger: see `__call__`."""

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> "DraftCounter":
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        step = getattr(scheduler_stats, "spec_decoding_stats", None)
        if step is not None:
            self.drafted += step.num_draft_tokens
            self.accepted += step.num_accepted_tokens

    def log_engine_initialized(self) -> None: ...
