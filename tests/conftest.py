"""What the whole suite shares: one thread a process, caches in pytest's own folder, and one warm-started tiny Beam."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SHARE_ENGINES = [
    f"tests/test_{name}.py" for name in ("parity_engine", "rollout_continue", "rollout_drafts", "rollout_engine")
]

# Minutes each: they start first, so that no worker is left with one of them when the others are done.
LONG = [
    "train",
    "megatron_layouts",
    "launch",
    "engine_faults",
    "megatron_lora",
    "train_lora",
    "faults",
    "paces",
    "plan",
]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WANDB_SILENT"] = "true"
# Both are read when Ray is imported: else its workers rebuild the environment of `uv run`, and listen to the network.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def pytest_configure(config: pytest.Config) -> None:
    assert config.cache is not None
    os.environ["BEAM_RL_CACHE"] = str(config.cache.mkdir("beam_rl"))


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """The tiny recipe's own checkpoint, seed 0: about a minute on first use, then kept with pytest's cache."""
    from beam_rl.tiny import cached_tiny

    return cached_tiny(0)


@pytest.fixture(scope="session")
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One Ray for all tests of this process; its address is for commands that need not start one of their own."""
    from beam_rl.cluster import ray_session

    with ray_session("local", tmp_path_factory.mktemp("ray")):
        import ray

        yield ray.get_runtime_context().gcs_address


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay together, and so do the files that share two engines, the last of which stops them."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "engines" if file in SHARE_ENGINES else file

    config.option.loadscopereorder = False  # by the number of tests, which says little
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first; tests marked `gpu` skip where there is none."""
    order = {f"test_{name}.py": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks without touching the GPU, which would spoil later forks
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


_status = int(pytest.ExitCode.INTERNAL_ERROR)  # until a session has finished


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    global _status
    _status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leaves without joining threads: those of Gloo, Ray and Megatron in one process can wait for each other for ever.

    A worker of pytest-xdist has to tell what it found first; its parent ends it.
    """
    if hasattr(config, "workerinput"):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)
