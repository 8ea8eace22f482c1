"""The ranks that train together: how a process becomes one of them, and what they add up.

Knows nothing about models or losses.
"""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from beam_rl.megatron.settings import TrainerSettings
from beam_rl.recipe.tree import Parallel

WRITE_LIMIT = timedelta(hours=1)  # for one rank to wait for the others' part of a checkpoint

_write_group: dist.ProcessGroup | None = None


def start_process(settings: TrainerSettings) -> torch.device:
    """The device of this process, and its settings."""
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # whoever starts the process shows it one GPU
        return torch.device("cuda", 0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return torch.device("cpu")


def join(settings: TrainerSettings, rank: int, world_size: int, master: str) -> None:
    """Meets the other ranks at `master` and forms the groups of the layout, whose operations have a time limit.

    Raises:
        ValueError: `world_size` does not fit the layout, or this process is in another group already.
    """
    parallel = settings.parallel
    if world_size != parallel.ranks:
        sizes = f"dp · tp · cp · pp = {parallel.dp} · {parallel.tp} · {parallel.cp} · {parallel.pp}"
        raise ValueError(f"trainer.parallel: {sizes}, but there are {world_size} trainer ranks")
    if dist.is_initialized():  # by an earlier trainer of this process
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size) or world_size > 1:
            raise ValueError(f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already")
    else:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        limit = timedelta(seconds=settings.collective_timeout_s)
        store = _meet(master, rank, world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        form_groups(parallel, settings.collective_timeout_s)
        global _write_group
        _write_group = dist.new_group(backend="gloo", timeout=WRITE_LIMIT)
    tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)


def form_groups(parallel: Parallel, timeout_s: float) -> None:
    """Megatron's groups of a layout, among the ranks of the process group that is there."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_s / 60,
    )


def _meet(master: str, rank: int, world_size: int) -> dist.Store:
    """The store at `master` ("host:port"), which rank 0 keeps. It listens on that host's address alone.

    torch's own `tcp://` would listen on every interface, and Gloo on the one that the host's name resolves to.
    """
    host, port = master.rsplit(":", 1)
    if host == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    listener = socket.create_server((host, int(port))).detach() if rank == 0 else None
    return dist.TCPStore(host, int(port), world_size, is_master=rank == 0, master_listen_fd=listener)


def write_group() -> dist.ProcessGroup:
    """All ranks again, on the host: for a thread that writes a checkpoint while the training uses the other groups."""
    assert _write_group is not None, "before join"
    return _write_group


def leave() -> None:
    """The process may then join another group."""
    global _write_group
    _write_group = None
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def vocabulary_group() -> dist.ProcessGroup | None:
    """The ranks that share embedding and head; None where there is one."""
    group = parallel_state.get_tensor_model_parallel_group()
    return group if group.size() > 1 else None


def whole_sequence(hidden: Tensor) -> Tensor:
    """(tokens, hidden) from the sequence-parallel ranks' slices.

    What follows is the same on every rank and gives each the whole gradient, of which it keeps its slice's.
    """
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)


def whole_context(values: Tensor, order: Tensor) -> Tensor:
    """(whole pack,) from the context-parallel ranks' rows.

    order: the place of each row among the gathered ones. Every rank goes on with all rows and computes the same from
    them, so each keeps the gradient of its own.
    """
    group = parallel_state.get_context_parallel_group()
    gathered = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=group)
    return gathered.index_select(0, order)


def sum_over_batch(sums: Tensor) -> None:
    """In place: what last-stage ranks counted of their replica's samples, summed over replicas, known to every rank.

    Tensor- and context-parallel neighbours have counted the same; earlier stages bring zeros.
    """
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())


def sum_over_replica(counts: Tensor) -> None:
    """In place: what each rank of one data-parallel replica counted of its own tokens and layers, summed over them."""
    dist.all_reduce(counts, group=parallel_state.get_model_parallel_group())
    dist.all_reduce(counts, group=parallel_state.get_context_parallel_group())


def all_of(finding: bool, device: torch.device) -> bool:
    """Whether every rank finds so."""
    votes = torch.tensor(int(finding), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes)


def largest(number: int, device: torch.device) -> int:
    """The largest of all ranks' numbers."""
    found = torch.tensor(number, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


def same_over_replicas(number: int, device: torch.device) -> bool:
    """Whether every data-parallel replica has the same number."""
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
    return int(ends[0]) == -int(ends[1])
