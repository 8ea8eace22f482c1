"""How the trainer's ranks and the engines of a run share Ray's GPUs; without GPUs nobody gets one."""

from beam_rl.errors import InputError
from beam_rl.recipe.tree import Recipe


def share_for(recipe: Recipe) -> float:
    """`gpu_share` of the run's processes, by what the Ray that this process is connected to has."""
    import ray

    gpus = int(ray.cluster_resources().get("GPU", 0))
    return gpu_share(gpus, recipe.trainer.parallel.ranks, recipe.rollout.engines)


def gpu_share(gpus: int, ranks: int, engines: int) -> float:
    """The part of a GPU that each trainer rank and each engine asks Ray for.

    A whole one where there are enough, so that no two meet on one (NCCL refuses two ranks on a GPU). On a single GPU a
    trainer of one rank and its engines share it.

    Raises InputError for what lies between.
    """
    processes = ranks + engines
    if gpus == 0 or gpus >= processes:
        return 1.0 if gpus else 0.0
    if gpus == 1 and ranks == 1:
        return int(1e4 / processes) / 1e4  # Ray counts in ten-thousandths
    raise InputError(
        f"trainer.parallel has {ranks} ranks and rollout.engines = {engines}: they need a GPU each, and Ray has {gpus}"
    )
