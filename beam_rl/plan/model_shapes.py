"""What each trainer rank holds of the model: exact counts from the real Megatron model, built on the meta device.

`rank_shapes` is for everyone; it asks a process of its own, since Megatron can be told to be a rank of a layout without
the others only where nobody else uses it, and its remedies for CPUs (`megatron.compat`) would stay behind. Knows nothing
about bytes.
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from beam_rl.layout import place_of
from beam_rl.lora import Adapter
from beam_rl.recipe.tree import Parallel

if TYPE_CHECKING:
    from beam_rl.megatron.model import BeamModel

BUILD_LIMIT_S = 600.0


@dataclass(frozen=True)
class Held:
    """Parameters of a kind on a rank."""

    expert: bool  # of an expert: replicated over other ranks than the rest
    trainable: bool
    dtype: str  # "fp32" or "bf16"
    mxfp8: bool  # a projection that MXFP8 would multiply
    count: int


@dataclass(frozen=True)
class RankShape:
    """One rank's part of the model, an adapter's included."""

    held: tuple[Held, ...]
    largest: int  # elements of the largest parameter
    adapter: int  # elements that belong to an adapter
    buffers: int  # FP32 elements that are no parameters: the routers' correction biases

    @property
    def parameters(self) -> int:
        """With an adapter's, and without buffers."""
        return sum(h.count for h in self.held)

    def count(self, **kind: Any) -> int:
        """Elements of the parameters of a kind, such as `trainable=True, expert=False`."""
        return sum(h.count for h in self.held if all(getattr(h, name) == value for name, value in kind.items()))


def rank_shapes(config: Mapping[str, Any], parallel: Parallel, dtype: str, adapter: Adapter | None) -> list[RankShape]:
    """The shape of every rank, in their order.

    Args:
        config: the model's config.json. dtype: "fp32" or "bf16".
    """
    return shapes_of_layouts(config, [parallel], dtype, adapter)[0]


def shapes_of_layouts(
    config: Mapping[str, Any], layouts: Sequence[Parallel], dtype: str, adapter: Adapter | None
) -> list[list[RankShape]]:
    """The same for several layouts, in the time that one takes to start."""
    order: dict[str, Any] = {"config": dict(config), "dtype": dtype, "adapter": asdict(adapter) if adapter else None}
    order["layouts"] = [parallel.model_dump() for parallel in layouts]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "beam_rl.plan.model_shapes"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        env=environment,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the model could not be built without memory: {done.stderr[-2000:]}")
    found = []
    for parallel, stages in zip(layouts, json.loads(done.stdout.splitlines()[-1]), strict=True):
        by_stage = [_from_plain(shape) for shape in stages]
        places = [place_of(rank, parallel, config["mlp_layer_types"]) for rank in range(parallel.ranks)]
        found.append([by_stage[place.pp] for place in places])
    return found


def _from_plain(shape: dict[str, Any]) -> RankShape:
    return RankShape(tuple(Held(**held) for held in shape.pop("held")), **shape)


# --- in the process that builds ---------------------------------------------------------------------------


@contextlib.contextmanager
def as_rank(rank: int, parallel: Parallel) -> Iterator[None]:
    """Inside, Megatron in this process is one rank of the layout; the others do not exist, and nothing may be sent."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from beam_rl.megatron.ranks import form_groups

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.ranks)
    try:
        form_groups(parallel, timeout_s=60)
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_on_meta(
    config: Mapping[str, Any], parallel: Parallel, dtype: str, adapter: Adapter | None
) -> "list[BeamModel]":
    """This rank's chunks of the model, with the adapter on them; parameters have shapes and no memory.

    Call it inside `as_rank`, after `megatron.compat.install()`.
    """
    import torch
    from transformers import AutoConfig

    from beam_rl.megatron.lora import AdaptedModel
    from beam_rl.megatron.model import build_chunks, config_from_hf, layout_fields

    class WithoutOthers(AdaptedModel):
        def _first_holders(self) -> dict[Any, int]:
            return {}  # only a sync needs to know, and it would have to ask the other ranks

    plain = dict(config)
    hf = AutoConfig.for_model(plain.pop("model_type"), **plain)
    fields = layout_fields(parallel, hf.num_hidden_layers, "none")
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    with torch.device("meta"):
        chunks = build_chunks(config_from_hf(hf, types[dtype], torch.device("meta"), **fields))
        if adapter is not None:
            WithoutOthers(chunks, adapter, config)
    return chunks


def shape_of(chunks: "Sequence[BeamModel]") -> RankShape:
    """Counts what chunks hold."""
    import torch

    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    counts: dict[Held, int] = {}
    largest = adapter = 0
    for name, parameter in (item for chunk in chunks for item in chunk.named_parameters()):
        projection = (
            any(f"linear_{part}." in name for part in ("qkv", "proj", "fc1", "fc2")) and ".adapter." not in name
        )
        expert = ".experts." in name
        kind = Held(expert, parameter.requires_grad, names[parameter.dtype], projection, 0)
        counts[kind] = counts.get(kind, 0) + parameter.numel()
        largest = max(largest, parameter.numel())
        adapter += parameter.numel() if ".adapter." in name else 0
    held = tuple(Held(k.expert, k.trainable, k.dtype, k.mxfp8, count) for k, count in counts.items())
    buffers = sum(buffer.numel() for chunk in chunks for buffer in chunk.buffers())
    return RankShape(held, largest, adapter, buffers)


def _main() -> None:
    """Reads an order from stdin; prints one rank's shape for each layout and stage: within a stage all are alike."""
    order = json.loads(sys.stdin.read())
    adapter = order["adapter"] and Adapter(**order["adapter"] | {"targets": tuple(order["adapter"]["targets"])})
    from beam_rl.megatron import compat

    compat.install()
    gc.disable()  # a quarter of the time would go into looking through modules that reference counts free
    found = []
    for layout in order["layouts"]:
        parallel, shapes = Parallel(**layout), []
        for stage in range(parallel.pp):
            with as_rank(stage * (parallel.ranks // parallel.pp), parallel):
                shapes.append(asdict(shape_of(build_on_meta(order["config"], parallel, order["dtype"], adapter))))
        found.append(shapes)
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
