"""A weight sync between this process and an engine in it, without Ray: for benches and for tests on a GPU."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from beam_rl.rollout.sync.link import Link, open_sender
from beam_rl.rollout.sync.transport import SyncStats

if TYPE_CHECKING:
    from beam_rl.rollout.engine import Engine


class LocalSync:
    """`join` comes first."""

    def __init__(self, engine: "Engine", link: Link, device: torch.device) -> None:
        """device: where the tensors are that will be sent."""
        self.engine, self.loop = engine, asyncio.get_running_loop()
        self.sender = open_sender(link, [engine.settings.parallel.workers], device)

    async def join(self) -> None:
        joining = asyncio.run_coroutine_threadsafe(self.engine.join_sync(self.sender.join_infos()[0]), self.loop)
        await asyncio.to_thread(self.sender.connect, [joining])

    async def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> tuple[SyncStats, str | None]:
        """What was sent, and what `Engine.finish_update` says."""
        await self.engine.begin_update()
        stats = await asyncio.to_thread(
            self.sender.send,
            tensors,
            lambda bucket: [asyncio.run_coroutine_threadsafe(self.engine.update(bucket), self.loop)],
        )
        return stats, await self.engine.finish_update(version)
