"""Prompts with gold answers, from files or the hub, in a reproducible order."""

from beam_rl.data.prompts import Counts, PromptStream, read_prompts
from beam_rl.data.rows import DataError

__all__ = ["Counts", "DataError", "PromptStream", "read_prompts"]
