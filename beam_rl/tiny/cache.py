"""Finds the small, warm-started Beam that was made before, or has it made.

What every command asks first, so it imports none of what makes a model. Knows nothing about recipes.
"""

import fcntl
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
import torch
import transformers

from beam_rl.tiny.sizes import TINY, Schedule, Size

if TYPE_CHECKING:
    from beam_rl.tiny.checkpoint import Dtype
    from beam_rl.tiny.warmstart import Progress

REPORT = "warm_start.json"  # beside the checkpoint of a size that is trained to a target


def cache_root() -> Path:
    """`BEAM_RL_CACHE`, else `$XDG_CACHE_HOME/beam-rl`, else `~/.cache/beam-rl`."""
    if own := os.environ.get("BEAM_RL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "beam-rl"


def fingerprint() -> str:
    """A short hash of what decides the files' content besides seed and dtype: our code, the libraries' versions."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for version in (
        torch.__version__,
        transformers.__version__,
        tokenizers.__version__,
    ):
        digest.update(version.encode())
    return digest.hexdigest()[:12]


def cached_tiny(
    seed: int = 0,
    dtype: "Dtype" = "fp32",
    progress: "Progress | None" = None,
    *,
    schedule: Schedule | None = None,
    size: Size = TINY,
) -> Path:
    """The folder of the small Beam with this size, seed and dtype; made on first use, then found.

    Processes that ask at once wait for the first of them. `schedule` as in `write_tiny`.
    """
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{fingerprint()} {schedule or size.schedule}".encode()).hexdigest()[:12]
    folder = root / f"{size.name}-seed{seed}-{dtype}-{key}"
    with (root / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also if this process is killed
        if not folder.exists():
            from beam_rl.tiny.write import write_tiny  # with transformers' models, which take a second to import

            write_tiny(folder, seed, progress, dtype=dtype, schedule=schedule, size=size)
    return folder
