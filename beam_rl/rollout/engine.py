"""One vLLM engine as an asynchronous object: token ids in; token ids, their log-probabilities and routes out.

Made to be a Ray actor, knows nothing about Ray itself. Promises: what a request samples hangs on its seed and
on the batch it was handed in with, not on arrival; the engine serves exactly one version of the weights; no process stays
behind when it stops or its process is killed.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_rl.checksum import checksum
from beam_rl.errors import InputError
from beam_rl.model_config import experts_of, layer_kinds
from beam_rl.parity.record import Records
from beam_rl.rollout import process
from beam_rl.rollout.completion import (
    check_fits,
    make_completion,
    routes_of_tokens,
    sampling_params,
    stop_ids,
    text_of_last,
)
from beam_rl.rollout.launch import EngineSettings, launch, set_environment
from beam_rl.rollout.routes import Routes, route_dtype
from beam_rl.rollout.sync.place import Place
from beam_rl.rollout.traces import Traces
from beam_rl.samples import Completion, Request

LOG_TAIL_LINES = 25
STOP_GRACE_S = 10.0
WATCH_S = 0.5


class EngineStartError(InputError):
    """vLLM did not start; the message ends with the last lines of the engine's own log."""


@dataclass(frozen=True)
class EngineInfo:
    """What a started engine says about itself. `moe_layers[j]` is the global layer number of column j of the routes."""

    moe_layers: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    version: int
    pid: int
    child_pids: tuple[int, ...]
    log: str


@dataclass(frozen=True)
class EngineCounters:
    """Since the start, but for `in_flight` and `routes_held`, which as `preemptions` is of CPU engines."""

    in_flight: int
    prompt_tokens: int  # of completed requests
    cached_prompt_tokens: int  # of these, found in the prefix cache
    preemptions: int
    drafted_tokens: int  # speculative decoding
    accepted_tokens: int  # of these
    routes_held: int  # finished responses whose routes the worker still keeps; 0 when nothing is in flight


@dataclass(frozen=True)
class AdapterSlot:
    """Room for one of a module's adapters: A (slots, experts or 1, rank, inputs), B (slots, experts or 1, outputs, rank)."""

    module: str
    a: list[int]
    b: list[int]
    bytes: int


class Engine:
    """A sampling engine; `start` comes first."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.version = 0
        self.adapter_id = 0  # vLLM's id of the adapter served; 0: the checkpoint alone
        self.llm: Any = None
        self.traces = Traces(settings)
        self.info: EngineInfo | None = None
        self.watch: asyncio.Task[None] | None = None
        self.drafts: Any = None  # a DraftCounter, where tokens are drafted
        self.in_flight: set[str] = set()  # vLLM's ids of unfinished requests
        self.update_state = "none"  # "none", "running", or why the weights are no longer one version
        self.next_bucket = 0  # of the update under way
        self.bucket_order = asyncio.Condition()
        self.admission = asyncio.Lock()
        self.interrupted = False  # from `interrupt` until `release`
        self.prompt_tokens = self.cached_prompt_tokens = 0
        self.asleep: set[str] = set()  # of "weights" and "kv_cache", what has given its GPU memory back
        self.weights_gone = False  # dropped while asleep, and not synced since

    async def start(self, host: str | None = None) -> EngineInfo:
        """Loads the checkpoint; returns when the engine can sample. Raises EngineStartError.

        Args:
            host: this machine's address, where the settings could not know it.
        """
        self.settings = replace(self.settings, host=host or self.settings.host)
        set_environment(self.settings)
        try:
            stops = stop_ids(self.settings.model)
            if self.settings.speculative is not None:
                from beam_rl.rollout.drafts import DraftCounter

                self.drafts = DraftCounter()
            self.llm = launch(self.settings, [self.drafts] if self.drafts else None)
        except InputError:
            raise
        except Exception as error:
            raise EngineStartError(start_failure(error, self.settings.log)) from None
        from beam_rl.rollout import compat

        kinds = layer_kinds(self.llm.model_config.hf_config.to_dict())
        self.info = EngineInfo(
            moe_layers=tuple(i for i, kind in enumerate(kinds) if kind == "sparse"),
            stop_token_ids=stops,
            version=self.version,
            pid=os.getpid(),
            child_pids=tuple(compat.child_pids(self.llm)),
            log=str(self.settings.log),
        )
        self.watch = asyncio.create_task(self._die_with(self.info.child_pids))
        return self.info

    async def _die_with(self, pids: Sequence[int]) -> None:
        """Ends this process when one of vLLM's has ended: some calls into a dead vLLM would never return."""
        while not process.ended(pids):
            await asyncio.sleep(WATCH_S)
        with self.settings.log.open("a") as log:
            print(f"a process of vLLM's ({', '.join(map(str, pids))}) has ended, and this engine with it", file=log)
        os._exit(1)

    async def generate(self, requests: list[Request]) -> AsyncIterator[Completion]:
        """Samples all requests at once and yields each completion when it is done.

        `token_ids` and `logp` include the stop token. `interrupt` ends it early: then the unfinished completions have the
        tokens so far and say "abort". Raises ValueError, before anything is sampled, for a request that
        cannot fit `max_model_len`; RuntimeError during a weight update or after a failed one.
        """
        for request in requests:
            check_fits(request, self.settings.max_model_len)
        done: asyncio.Queue[tuple[Request, str, Any]] = asyncio.Queue()
        tasks = await self._admit(requests, done)
        for request in requests if tasks is None else ():
            yield Completion.not_begun(request, self.version)
        if tasks is None:
            return
        left = set(tasks)
        try:
            while left:
                ended = await _everything_in(done)
                left -= {internal_id for _, internal_id, _ in ended}
                for completion in await self._complete(ended):
                    yield completion
        finally:
            for task in tasks.values():
                task.cancel()
            await self._abandon(left)

    async def interrupt(self) -> None:
        """Ends what is being sampled, and lets nothing begin before `release`."""
        self.interrupted = True
        async with self.admission:
            await self.llm.pause_generation(mode="abort", clear_cache=False)
            await self.llm.resume_generation()

    async def release(self) -> None:
        """After `interrupt`: requests are sampled again."""
        self.interrupted = False

    async def sleep(self) -> None:
        """Gives the GPU's memory back: the KV cache, and the weights, which with an adapter stay in host memory.

        Without one they are gone: a sync of all weights has to come before the next request. For when nothing is being
        sampled; an engine whose settings don't let it sleep, as none does on a CPU, stays awake.
        """
        if not self.settings.sleeps or self.asleep == {"weights", "kv_cache"}:
            return
        if self.in_flight:
            raise RuntimeError(f"cannot sleep: {len(self.in_flight)} requests are still sampling")
        await self._wake_all()
        keeps_weights = self.settings.adapter is not None
        self.asleep = {"weights", "kv_cache"}
        self.weights_gone = not keeps_weights
        await self.llm.sleep(level=1 if keeps_weights else 2)

    async def wake(self, part: str) -> None:
        """Takes the GPU memory of "weights" or "kv_cache" again."""
        if part in self.asleep:
            self.asleep -= {part}
            await self.llm.wake_up(tags=[part])

    async def _wake_all(self) -> None:
        """vLLM goes to sleep as a whole: an engine of which a part sleeps wakes first."""
        for part in sorted(self.asleep):
            await self.wake(part)

    async def begin_trace(self, engine_steps: int) -> str | None:
        """Records what vLLM does in its next steps, so many (`rollout.traces`); what kept it from that, if anything did."""
        return await self.traces.begin(self.llm, engine_steps)

    async def end_trace(self, path: str) -> str | None:
        """Brings what was recorded to PATH.json and .txt; what kept it from being there, if anything did."""
        return await self.traces.end(self.llm, path)

    async def alive(self) -> None:
        """Returns when vLLM's processes have answered; raises what they died of."""
        await self.llm.check_health()
        await self.llm.is_paused()

    async def begin_update(self) -> None:
        """Opens a weight update: of the adapter, where the settings have one, else of all weights.

        One that was left half way is forgotten; after an update of all weights that failed, this is the way back.
        Raises RuntimeError while requests are running: their samples would mix versions.
        """
        if self.settings.adapter is not None and self.update_state != "running":
            self._refuse_during_update("begin a weight update")
        if self.in_flight:
            raise RuntimeError(f"cannot begin a weight update: {len(self.in_flight)} requests are still sampling")
        is_open, self.update_state = self.update_state != "none", "running"  # at once, so that no request slips in
        self.next_bucket = 0
        try:
            if self.settings.adapter is not None:
                await self.llm.collective_rpc("begin_adapter")
                return
            if is_open:
                await self.llm.collective_rpc("abandon_weights")
            await self.llm.start_weight_update()
        except Exception as error:
            self.update_state = f"a weight update did not begin ({error})"
            raise

    async def sync_places(self) -> list[Place]:
        """Where this engine's workers are, for the choice of a transport."""
        return [Place(*fields) for fields in await self._workers("sync_place")]

    async def join_sync(self, join: dict[str, Any]) -> None:
        """Joins a sender (`sync.transport.WeightSender`); `join` is what it says of this engine in `join_infos`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"join": join, "local_host": self.settings.host}
        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def update(self, bucket: dict[str, Any]) -> None:
        """Receives and loads one bucket; `bucket` is what the sender announces. Calls may overlap and overtake."""
        async with self.bucket_order:
            await self.bucket_order.wait_for(
                lambda: bucket["number"] <= self.next_bucket or self.update_state != "running"
            )
            self._require_update()
            loading = asyncio.ensure_future(self._load(bucket))
            await asyncio.sleep(0)  # the call is on its way to vLLM, which takes calls one after the other
            self.next_bucket += 1
            self.bucket_order.notify_all()
        try:
            await loading
        except Exception as error:
            # Of an adapter nothing is loaded before all of it is there.
            half_way = f"a weight update failed half way ({error})"
            self.update_state = half_way if self.settings.adapter is None else "none"
            raise

    async def _load(self, bucket: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self.settings.adapter is None:
            await self.llm.update_weights(WeightTransferUpdateRequest(update_info={"bucket": bucket}))
        else:
            await self.llm.collective_rpc("receive_adapter", args=(bucket,))

    async def abandon_update(self) -> None:
        """Ends an update that somebody else's failure has cut off, if one is under way.

        An engine that no weights came to, or one with an adapter, serves the version before on; another one can do
        nothing but begin a new update.
        """
        if self.update_state != "running":
            return
        if self.settings.adapter is None and self.next_bucket:
            self.update_state = "a weight update was cut off half way"
            return
        if self.settings.adapter is None:
            await self.llm.collective_rpc("abandon_weights")
        self.update_state = "none"

    async def finish_update(self, version: int) -> str | None:
        """Closes the update: every tensor has come, caches of the old weights are dropped, `version` is served.

        Returns the checksum (`beam_rl.checksum`) of the adapter that the engine holds now; None for all weights.
        Raises ValueError for an adapter that is not whole or not finite; the version before it is served on.
        """
        self._require_update()
        try:
            if self.settings.adapter is None:
                held, refusal = None, ""
                await self.llm.finish_weight_update(weight_version=str(version))
            else:
                replies = await self._workers("swap_adapter", self.adapter_id + 1)
                refusal = next((refusal for _, refusal in replies if refusal), "")
                held = None if refusal else self._checksum([held for held, _ in replies])
            if not refusal:
                await self.forget_prefixes()
        except Exception as error:
            self.update_state = f"a weight update did not finish ({error})"
            raise
        self.update_state, self.weights_gone = "none", False
        if refusal:
            raise ValueError(refusal)
        self.version = version
        if self.settings.adapter is not None:
            self.adapter_id += 1
        return held

    async def adapter_checksum(self) -> str:
        """The checksum (`beam_rl.checksum`) of the adapter that the engine holds now."""
        return self._checksum(await self._workers("held_adapter"))

    def _checksum(self, held: list[Any]) -> str:
        """One checksum of what the workers hold together. RuntimeError where those of a stage should agree and don't."""
        tp, pp = self.settings.parallel.tp, self.settings.parallel.pp
        digests: dict[str, str] = {}
        for stage in range(pp):
            own = [worker for i, worker in enumerate(held) if i // tp % pp == stage]
            if len({summed for summed, _ in own}) > 1:
                raise RuntimeError("the engine's workers hold different adapters")
            digests |= own[0][1]
        return checksum(digests)

    async def _workers(self, method: str, *args: Any) -> list[Any]:
        from beam_rl.rollout import compat

        return await compat.on_workers(self.llm, method, *args)

    async def adapter_slots(self) -> list[AdapterSlot]:
        """What vLLM has set aside for the adapter."""
        return [AdapterSlot(*slot) for slot in (await self.llm.collective_rpc("adapter_slots"))[0]]

    async def forget_prefixes(self) -> None:
        """Empties the prefix cache. Raises RuntimeError when vLLM keeps it, as while requests run."""
        if not await self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, which holds keys and values of earlier weights or requests")

    async def weight(self, name: str) -> NDArray[Any]:
        """What the engine's first worker holds now under a checkpoint's tensor name; BF16 comes as its bits in uint16."""
        return (await self.weight_shards(name))[0]

    async def weight_shards(self, name: str) -> list[NDArray[Any]]:
        """What each worker that has a part of it holds; in the order of the workers."""
        held = [reply for reply in await self._workers("read_weight", name) if reply]
        return [
            np.frombuffer(raw, np.uint16 if dtype == "bfloat16" else dtype).reshape(shape) for dtype, shape, raw in held
        ]

    async def probe(
        self, token_ids: list[int], routes: Routes | None, temperature: float, sublayers: bool = True
    ) -> Records:
        """Prefills one sequence alone, without CUDA graphs, and returns what it computed for every token but the last.

        routes: (tokens − 1, MoE layers, top-k) experts to use; None: as the routers choose. temperature: of the logits.
        sublayers: every one that the model shows, or the log-probabilities of the next tokens alone.
        Raises ValueError for routes of another length, InputError for an engine of several workers, each of which computes
        a part of a sub-layer; RuntimeError while requests are running or weights are updated.
        """
        if self.settings.parallel.workers > 1:
            raise InputError("rollout.parallel: parity looks into engines of one worker; use tp, pp and dp = 1 for it")
        if routes is not None and len(routes) != len(token_ids) - 1:
            raise ValueError(f"{len(routes)} rows of routes for a sequence of {len(token_ids)} tokens")
        self._refuse_during_update("probe")
        if self.in_flight:
            raise RuntimeError(f"cannot probe: {len(self.in_flight)} requests are still sampling")
        raw = b"" if routes is None else routes.astype(np.int64).tobytes()
        shape = [] if routes is None else list(routes.shape)
        try:
            await self.llm.collective_rpc("begin_probe", args=(raw, shape, sublayers))
            await self._prefill(token_ids[:-1])
            found = (await self.llm.collective_rpc("take_probe", args=(token_ids[1:], temperature)))[0]
        finally:
            await self.llm.collective_rpc("cancel_probe")
        return {(layer, name): np.frombuffer(raw, np.float32).reshape(shape) for layer, name, shape, raw in found}

    async def _prefill(self, token_ids: list[int]) -> None:
        """Runs every one of the tokens through the model once, whatever the prefix cache holds."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1, detokenize=False, skip_reading_prefix_cache=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        collector = await self.llm.add_request(
            "probe", tokens_input(token_ids), params, lora_request=self._served_adapter()
        )
        await collector.get()
        if self._routes_come_from_worker():
            await self.llm.collective_rpc("drop_routes", args=([collector.request_id],))

    async def counters(self) -> EngineCounters:
        """What the engine has done and holds."""
        held = preemptions = 0
        if self._routes_come_from_worker():
            held, preemptions = (await self.llm.collective_rpc("route_counters"))[0]
        return EngineCounters(
            in_flight=len(self.in_flight),
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            preemptions=preemptions,
            drafted_tokens=self.drafts.drafted if self.drafts else 0,
            accepted_tokens=self.drafts.accepted if self.drafts else 0,
            routes_held=held,
        )

    async def stop(self) -> None:
        """Ends vLLM's processes; returns when they are gone."""
        if self.llm is None or self.info is None:
            return
        assert self.watch is not None
        self.watch.cancel()
        self.llm.shutdown()
        process.end(list(self.info.child_pids), STOP_GRACE_S)
        self.llm = None

    async def _admit(self, requests: list[Request], done: asyncio.Queue) -> dict[str, asyncio.Task] | None:
        """Hands all requests to vLLM while its scheduler is held, so that its steps are the same in every run.

        Returns the task that waits for each, by vLLM's id of the request; None while the engine is interrupted.
        """
        tasks: dict[str, asyncio.Task] = {}
        async with self.admission:
            if self.interrupted:
                return None
            self._refuse_during_update("sample")
            await self.llm.pause_generation(mode="keep", clear_cache=False)
            try:
                for request in requests:
                    collector = await self._add(request)
                    self.in_flight.add(collector.request_id)
                    tasks[collector.request_id] = asyncio.create_task(_wait(request, collector, done))
            finally:
                await self.llm.resume_generation()
        return tasks

    async def _add(self, request: Request) -> Any:
        from vllm.inputs import tokens_input

        from beam_rl.rollout import compat

        assert self.info is not None
        params = sampling_params(request, self.info.stop_token_ids)
        collector = await self.llm.add_request(
            request.id, tokens_input(request.prompt_ids), params, lora_request=self._served_adapter()
        )
        if request.stop_strings and request.begun:
            begun = text_of_last(self.llm.get_tokenizer(), request.prompt_ids, request.begun)
            compat.begin_text(self.llm, collector.request_id, begun)
        return collector

    def _served_adapter(self) -> Any:
        """What vLLM takes for a request's adapter: that of the version served."""
        from beam_rl.rollout import compat

        return compat.adapter_request(self.adapter_id) if self.adapter_id else None

    async def _complete(self, ended: list[tuple[Request, str, Any]]) -> list[Completion]:
        self.in_flight -= {internal_id for _, internal_id, _ in ended}
        for request, _, output in ended:
            if isinstance(output, Exception):
                tail = process.last_lines(self.settings.log, LOG_TAIL_LINES)
                where = f"Last lines of {self.settings.log}:\n{tail}"
                raise RuntimeError(f"request {request.id} failed: {output!r}\n{where}") from output
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_prompt_tokens += output.num_cached_tokens or 0
        routes = await self._routes_of([(internal_id, output) for _, internal_id, output in ended])
        if self.settings.speculative or self.settings.tokenizer:
            # Drafts, or a step begun before a stop string was found, may have gone beyond the response's end.
            routes = [routes_of_tokens(rows, output) for rows, (_, _, output) in zip(routes, ended, strict=True)]
        return [
            make_completion(request, output.outputs[0], rows, self.version, self.settings.routing_replay)
            for (request, _, output), rows in zip(ended, routes, strict=True)
        ]

    async def _routes_of(self, ended: list[tuple[str, Any]]) -> list[Routes | None]:
        assert self.info is not None
        if not self.settings.routing_replay:
            return [None] * len(ended)
        if not self._routes_come_from_worker():
            # vLLM reports every layer, dense ones too: keep the MoE layers by their global number.
            returned = [output.outputs[0].routed_experts for _, output in ended]
            return [None if every is None else every[:, list(self.info.moe_layers)] for every in returned]
        ids = [internal_id for internal_id, _ in ended]
        config, stages, counts = self.llm.model_config.hf_config.to_dict(), [], [0]
        for layers, raw, rows in await self._workers("take_routes", ids):
            if rows:
                held = np.frombuffer(raw, route_dtype(experts_of(config)))
                stages.append(held.reshape(sum(rows), len(layers), config["num_experts_per_tok"]))
                counts = rows
        return list(np.split(np.concatenate(stages, axis=1), np.cumsum(counts)[:-1]))

    async def _abandon(self, ids: set[str]) -> None:
        """Aborts requests that nobody waits for any more, and their routes."""
        if not ids or self.llm is None:
            return
        self.in_flight -= ids
        await self.llm.abort(ids, internal=True)
        if self._routes_come_from_worker():
            await self.llm.collective_rpc("drop_routes", args=(list(ids),))

    def _routes_come_from_worker(self) -> bool:
        """Our own CPU worker keeps the routes; on a GPU vLLM returns them with the output."""
        from vllm.platforms import current_platform

        return self.settings.routing_replay and current_platform.is_cpu()

    def _refuse_during_update(self, what: str) -> None:
        if what in ("sample", "probe") and (self.asleep or self.weights_gone):
            raise RuntimeError(f"cannot {what}: the engine " + ("sleeps" if self.asleep else "has no weights yet"))
        if self.update_state == "running":
            raise RuntimeError(f"cannot {what}: a weight update is under way")
        if self.update_state != "none":
            remedy = "sync all weights again" if self.settings.adapter is None else "restart the engine"
            raise RuntimeError(f"cannot {what}: {self.update_state}; {remedy}")

    def _require_update(self) -> None:
        if self.update_state != "running":
            raise RuntimeError("no weight update is under way: call begin_update first")


def start_failure(error: Exception, log: Path) -> str:
    """Why vLLM did not start, in a line, and the log's last lines. The cause is in the log where a child process failed."""
    tail = process.last_lines(log, LOG_TAIL_LINES)
    raised = [line for line in tail.splitlines() if re.match(r"[\w.]*(Error|Exception): ", line)]
    return f"vLLM did not start: {raised[-1] if raised else error}\nLast lines of {log}:\n{tail}"


async def _wait(request: Request, collector: Any, done: asyncio.Queue) -> None:
    try:
        output = await collector.get()
    except Exception as error:
        output = error
    done.put_nowait((request, collector.request_id, output))


async def _everything_in(queue: asyncio.Queue) -> list[Any]:
    """Waits for one item and returns it with all that are there by then."""
    items = [await queue.get()]
    while not queue.empty():
        items.append(queue.get_nowait())
    return items
