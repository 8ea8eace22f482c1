"""Beam in Megatron: one rank of the policy, on a CPU or a GPU. Knows nothing about Ray or vLLM.

`start_trainer` is the way in: it makes Megatron importable on this machine first. Importing this package, or its
`settings`, costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from beam_rl.megatron.settings import TrainerSettings
    from beam_rl.megatron.trainer import Trainer


def start_trainer(model_path: str, settings: TrainerSettings, rank: int, world_size: int, master: str) -> Trainer:
    """A `Trainer` in this process, which takes part in the group of `world_size` ranks that meets at `master`."""
    from beam_rl.megatron import compat

    compat.install()
    from beam_rl.megatron.trainer import Trainer  # imports Megatron, so only now

    return Trainer(model_path, settings, rank, world_size, master)
