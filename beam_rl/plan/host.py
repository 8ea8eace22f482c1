"""What a node's host memory and NVMe hold, at most, of one run. Knows nothing about GPUs' insides."""

import math
from dataclasses import dataclass

from beam_rl.lora import adapter_tensors
from beam_rl.plan import gpu, memory
from beam_rl.plan.case import Case

GPU_RANK_BYTES = 4 * 10**9  # resident in a trainer rank on a GPU: CUDA's and torch's libraries, pinned staging
GPU_WORKER_BYTES = 5 * 10**9  # in a vLLM worker on a GPU
DRIVER_BYTES = 2 * 10**9  # the loop, Ray's own processes, the verifier's pool
READ_WINDOW_BYTES = 2**30  # of a checkpoint file that a rank has mapped and read at one time
TOKEN_BYTES = 40  # of a sample's token in the driver and in a micro-batch, without its routes


@dataclass(frozen=True)
class Node:
    """Bytes by what they are for."""

    processes: int  # libraries, on a CPU with all that ranks and engines hold
    waiting: int  # of trainers whose GPUs the engines have
    engine_base: int  # of sleeping engines: the base that an adapter is served on
    adapters: int  # that vLLM's workers keep beside their slots, and the one that arrives
    optimizer: int  # in host memory by the recipe's wish, or blocks on their way to NVMe
    checkpoint: int  # copies that are being written while training goes on
    samples: int  # of a step, with their routes: the driver's, on one node
    nvme: int

    @property
    def host(self) -> int:
        held = self.processes + self.waiting + self.engine_base + self.adapters
        return held + self.optimizer + self.checkpoint + self.samples


def fullest_node(case: Case) -> Node:
    """The first node has the driver; all others hold what their ranks and engines do."""
    nodes = [_node(case, node) for node in range(case.nodes)]
    return max(nodes, key=lambda node: node.host)


def fullest_nvme(case: Case) -> int:
    return max(_node(case, node).nvme for node in range(case.nodes))


def _node(case: Case, node: int) -> Node:
    ranks = case.ranks_on.get(node, [])
    engines = case.engines_on.get(node, 0)
    waits = [_waiting(case, rank) for rank in ranks] if case.shares_gpus else []
    in_files = case.recipe.trainer.wait_in == "nvme"
    return Node(
        processes=_processes(case, node, len(ranks), engines),
        waiting=0 if in_files else sum(waits),
        engine_base=engines * _asleep_base(case),
        adapters=2 * engines * case.recipe.rollout.parallel.workers * adapter_bytes(case),
        optimizer=sum(_optimizer(case, rank) for rank in ranks),
        checkpoint=sum(_checkpoint(case, rank) for rank in ranks),
        samples=sample_bytes(case) if node == 0 else 0,
        nvme=sum(nvme_of(case, rank) for rank in ranks) + (sum(waits) if in_files else 0),
    )


def _processes(case: Case, node: int, ranks: int, engines: int) -> int:
    workers = engines * case.recipe.rollout.parallel.workers
    driver = DRIVER_BYTES if node == 0 else 0
    if case.on_gpus:
        reading = ranks * READ_WINDOW_BYTES
        return driver + ranks * GPU_RANK_BYTES + workers * GPU_WORKER_BYTES + reading
    held = sum(place.peak.total for place in [*gpu.rank_places(case), *gpu.engine_places(case)])
    return driver + held


def _waiting(case: Case, rank: int) -> int:
    return memory.waiting_bytes(case.shapes[rank], case.replicas, case.optimizer)


def _asleep_base(case: Case) -> int:
    """vLLM's first level of sleep copies the weights to the host; without an adapter they are dropped."""
    asleep = case.shares_gpus and case.adapter is not None
    return case.recipe.rollout.parallel.workers * case.engine.weights if asleep else 0


def adapter_bytes(case: Case) -> int:
    """Of a whole adapter in HF form, which each worker gets."""
    if case.adapter is None:
        return 0
    return case.value_bytes * sum(math.prod(shape) for shape in adapter_tensors(case.adapter, case.config).values())


def _optimizer(case: Case, rank: int) -> int:
    kind = case.optimizer
    if kind.offload == "cpu":
        return memory.state_bytes(case.shapes[rank], case.replicas, kind)
    return memory.block_bytes(kind, memory.NVME_BLOCKS_ON_HOST)


def _checkpoint(case: Case, rank: int) -> int:
    """Trained weights of which this rank writes its share, and the optimizer's state where that is not in files."""
    if not case.recipe.checkpoint.asynchronous:
        return 0
    shape, kind = case.shapes[rank], case.optimizer
    trained = sum(
        memory.SIZE[h.dtype] * h.count // (case.replicas.expert if h.expert else case.replicas.dense)
        for h in shape.held
        if h.trainable
    )
    state = 0 if kind.offload == "nvme" else memory.state_bytes(shape, case.replicas, kind)
    return trained + state


def nvme_of(case: Case, rank: int) -> int:
    """Two generations of a rank's state; checkpoints on the same file system take more (docs/nvme.md)."""
    if case.optimizer.offload != "nvme":
        return 0
    state = memory.state_bytes(case.shapes[rank], case.replicas, case.optimizer)
    return 2 * state


def sample_bytes(case: Case) -> int:
    """A step's samples at their longest in the driver, and once more in Ray's store on their way to the ranks."""
    c, r = case.config, case.recipe.rollout
    width = 1 if c["num_experts"] <= 256 else 2
    routes = width * c["num_experts_per_tok"] * c["mlp_layer_types"].count("sparse") if r.routing_replay else 0
    ahead = {"synchronous": 1, "one_step_off": 2, "asynchronous": 1 + case.recipe.algorithm.staleness}[r.pace]
    return round((1 + ahead) * case.samples * case.longest * (routes + TOKEN_BYTES))
