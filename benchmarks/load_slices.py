"""What loading a checkpoint costs a rank: seconds, bytes read and host memory, by the slice reader and by Megatron-Bridge.

Writes a sharded random Beam of `--gigabytes` into `--folder` (removed at the end), then loads some ranks of a layout, each
in a process of its own whose files are not in the page cache. One JSON object.

    python benchmarks/load_slices.py --folder /tmp/load --gigabytes 8
"""

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHARD_BYTES = 10**9
PARALLEL = {"dp": 4, "ep": 4, "pp": 2}  # as the 501B recipes; --parallel changes it
RANKS = (0, 3, 7)


def config_of(gigabytes: float) -> dict[str, Any]:
    """The 501B model's pattern with narrower layers: 12 of them, 64 experts, as wide as makes the size."""
    from beam_rl.checkpoint_shapes import checkpoint_shapes
    from beam_rl.plan.description import beam_501b

    config = beam_501b()
    for key in ("layer_types", "mlp_layer_types"):
        config[key] = config[key][:12]
    config |= {"num_hidden_layers": 12, "num_experts": 64, "num_attention_heads": 16, "vocab_size": 32768}
    for hidden in range(512, 8192, 128):
        config |= {"hidden_size": hidden, "intermediate_size": 4 * hidden, "moe_intermediate_size": hidden // 2}
        if 2 * sum(math.prod(shape) for shape in checkpoint_shapes(config).values()) >= gigabytes * 1e9:
            return config
    raise SystemExit("too many gigabytes")


def write(folder: Path, config: dict[str, Any]) -> int:
    """Shards of a gigabyte with random values; returns all bytes."""
    import torch
    from safetensors.torch import save_file

    from beam_rl.checkpoint_shapes import checkpoint_shapes, is_fp32
    from beam_rl.plan.description import write_config

    write_config(folder, config)
    shard: dict[str, Any] = {}
    files: dict[str, str] = {}
    total = held = number = 0

    def flush() -> None:
        nonlocal shard, held, number
        number += 1
        file = f"model-{number:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, file))
        shard, held = {}, 0

    for name, shape in checkpoint_shapes(config).items():
        kind = torch.float32 if is_fp32(name) else torch.bfloat16
        shard[name] = torch.randint(0, 2**15, shape, dtype=torch.int16).view(torch.bfloat16).to(kind)
        size = shard[name].nbytes
        held, total = held + size, total + size
        if held >= SHARD_BYTES:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return total


def forget(folder: Path) -> None:
    """Takes the files out of the page cache."""
    for file in folder.glob("*.safetensors"):
        number = os.open(file, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def load_rank(folder: Path, rank: int, how: str, layout: str) -> dict[str, Any]:
    """In a process of its own: builds a rank and fills it."""
    from beam_rl.megatron import compat

    compat.install()
    import torch

    from beam_rl.megatron.bridge import BeamCheckpoint
    from beam_rl.megatron.model import build_chunks, config_from_hf, layout_fields
    from beam_rl.megatron.slice_reader import SafetensorsFolder
    from beam_rl.megatron.slices import targets_of
    from beam_rl.plan.model_shapes import as_rank
    from beam_rl.recipe.tree import Parallel

    parallel = Parallel(**json.loads(layout))
    checkpoint = BeamCheckpoint(str(folder))
    with as_rank(rank, parallel), torch.no_grad():
        fields = layout_fields(parallel, checkpoint.config.num_hidden_layers, "none")
        chunks = build_chunks(config_from_hf(checkpoint.config, torch.bfloat16, torch.device("cpu"), **fields))
        for chunk in chunks:
            for tensor in chunk.parameters():
                tensor.zero_()  # touches the memory, so that it is not counted to the load
        held = sum(tensor.nbytes for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers()))
        before, read, start = peak(), disk_bytes(), time.perf_counter()
        if how == "slices":
            targets = ((t.tensor, t.slices) for t in targets_of(chunks, checkpoint.config))
            SafetensorsFolder(folder).read_into(targets)
        else:
            checkpoint._bridge.load_hf_weights(list(chunks))
        seconds = time.perf_counter() - start
    found = {"rank": rank, "held_bytes": held, "seconds": round(seconds, 3), "read_bytes": disk_bytes() - read}
    return found | {
        "host_bytes_beyond_the_model": peak() - before,
        "gb_per_second": round(found["read_bytes"] / seconds / 1e9, 2),
    }


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def disk_bytes() -> int:
    """That this process has fetched from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def disk_rate(folder: Path) -> float:
    """Bytes a second of reading one file in order, in large pieces, by as many threads as the reader has."""
    from concurrent.futures import ThreadPoolExecutor

    forget(folder)
    file = max(folder.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    size, piece = file.stat().st_size, 16 * 2**20
    number, start = os.open(file, os.O_RDONLY), time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: len(os.pread(number, piece, at)), range(0, size, piece)))
    os.close(number)
    return size / (time.perf_counter() - start)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--gigabytes", type=float, default=8.0)
    options.add_argument("--rank", type=int)
    options.add_argument("--how", default="slices")
    options.add_argument("--parallel", default=json.dumps(PARALLEL), help="trainer.parallel, as JSON")
    given = options.parse_args()
    if given.rank is not None:
        print(json.dumps(load_rank(given.folder, given.rank, given.how, given.parallel)))
        return
    try:
        total = write(given.folder, config_of(given.gigabytes))
        result: dict[str, Any] = {
            "checkpoint_bytes": total,
            "parallel": json.loads(given.parallel),
            "disk_gb_per_second": round(disk_rate(given.folder) / 1e9, 2),
        }
        for how in ("slices", "bridge"):
            result[how] = []
            for rank in RANKS:
                forget(given.folder)
                command = [sys.executable, __file__, "--folder", str(given.folder), "--rank", str(rank), "--how", how]
                command += ["--parallel", given.parallel]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.stderr[-2000:])
                result[how].append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(result, indent=1))
    finally:
        shutil.rmtree(given.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
