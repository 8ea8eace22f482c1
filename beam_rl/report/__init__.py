"""What a run shows: the terminal, metrics.jsonl and W&B. Plain numbers in; knows no Megatron, vLLM or Ray."""

from beam_rl.report.console import Console
from beam_rl.report.report import Report

__all__ = ["Console", "Report"]
