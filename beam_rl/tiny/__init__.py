"""A Beam of 0.7 million parameters with a task that it learns by RL in minutes on a laptop's CPU."""

from beam_rl.tiny.write import TinyReport, cached_tiny, write_tiny

__all__ = ["TinyReport", "cached_tiny", "write_tiny"]
