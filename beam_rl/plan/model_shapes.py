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
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beam_rl.checkpoint_shapes import weight_files
from beam_rl.errors import InputError
from beam_rl.layout import place_of
from beam_rl.lora import Adapter
from beam_rl.plan.tensors import NotCounted
from beam_rl.recipe.tree import Parallel

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt.gpt_model import GPTModel

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


@dataclass(frozen=True)
class Counted:
    """The model that is counted."""

    config: Mapping[str, Any]  # with Beam's names
    dtype: str  # "fp32" or "bf16"
    adapter: Adapter | None
    folder: Path | None = (
        None  # of another model than Beam: where its config.json is, and its weights if they are there
    )


class Unbuildable(InputError):
    """The trainer would refuse the model, too."""


def rank_shapes(model: Counted, parallel: Parallel) -> list[RankShape]:
    """The shape of every rank, in their order. Raises what `shapes_of_layouts` does."""
    return shapes_of_layouts(model, [parallel])[0]


def shapes_of_layouts(model: Counted, layouts: Sequence[Parallel]) -> list[list[RankShape]]:
    """The same for several layouts, in the time that one takes to start.

    Raises:
        Unbuildable: a model that Megatron can't be given as it is. NotCounted: one that it can, with Transformer Engine,
            or that can't be built without memory.
    """
    answer = _ask(model, layouts)
    if answer["refused"] and answer["unlike_on_gpu"]:
        raise NotCounted(f"{answer['refused']}; plans are made without one")
    if answer["refused"]:
        raise Unbuildable(answer["refused"])
    found = []
    for parallel, stages in zip(layouts, answer["shapes"], strict=True):
        by_stage = [_from_plain(dict(shape)) for shape in stages]
        places = [place_of(rank, parallel, model.config["mlp_layer_types"]) for rank in range(parallel.ranks)]
        found.append([by_stage[place.pp] for place in places])
    return found


def check_buildable(model: Counted, parallel: Parallel, on_gpus: bool) -> None:
    """InputError, in one line, for what a trainer in that layout would find out once it has built the model."""
    try:
        answer = _ask(model, [parallel])
    except NotCounted:
        return  # whether it can be trained, the trainer will know
    if answer["refused"] and not (on_gpus and answer["unlike_on_gpu"]):
        raise Unbuildable(answer["refused"])


def _ask(model: Counted, layouts: Sequence[Parallel]) -> dict[str, Any]:
    folder = model.folder
    order = {
        "config": dict(model.config),
        "dtype": model.dtype,
        "adapter": asdict(model.adapter) if model.adapter else None,
        "folder": folder and str(folder),
        "has_weights": folder is not None and any(file.exists() for file in weight_files(folder)),
        "layouts": [parallel.model_dump() for parallel in layouts],
    }
    try:
        return json.loads(_answer(json.dumps(order, default=str)))
    except RuntimeError as error:
        if folder is None:
            raise
        reason = str(error).strip().splitlines()[-1]
        raise NotCounted(
            f"model.path = {folder}: can't be built without memory, so it has no plan ({reason})"
        ) from None


@lru_cache(8)  # a run asks whether its model can be built, and the plan how large it is
def _answer(order: str) -> str:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "beam_rl.plan.model_shapes"],
            input=order,
            capture_output=True,
            text=True,
            env=environment,
            timeout=BUILD_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"building the model without memory took longer than {BUILD_LIMIT_S:g} s") from None
    if done.returncode:
        raise RuntimeError(f"the model could not be built without memory: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


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


def build_on_meta(model: Counted, parallel: Parallel) -> "list[GPTModel]":
    """This rank's chunks of the model, with the adapter on them; parameters have shapes and no memory.

    Call it inside `as_rank`, after `megatron.compat.install()`. InputError for a model that can't be trained.
    """
    import torch

    from beam_rl.megatron.lora import AdaptedModel

    class WithoutOthers(AdaptedModel):
        def _first_holders(self) -> dict[Any, int]:
            return {}  # only a sync needs to know, and it would have to ask the other ranks

    with torch.device("meta"):
        chunks = _beam(model, parallel) if model.folder is None else _bridged(model, parallel)
        if model.adapter is not None:
            WithoutOthers(chunks, model.adapter, model.config)
    return chunks


def _fields(model: Counted, parallel: Parallel) -> "tuple[torch.dtype, torch.device, dict[str, Any]]":
    """The dtype, the device, and Megatron's names for the layout."""
    import torch

    from beam_rl.megatron.model import layout_fields

    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return types[model.dtype], torch.device("meta"), layout_fields(parallel, model.config["num_hidden_layers"], "none")


def _beam(model: Counted, parallel: Parallel) -> "list[GPTModel]":
    from transformers import AutoConfig

    from beam_rl.megatron.model import build_chunks, config_from_hf

    plain = dict(model.config)
    hf = AutoConfig.for_model(plain.pop("model_type"), **plain)
    dtype, device, fields = _fields(model, parallel)
    return list(build_chunks(config_from_hf(hf, dtype, device, **fields)))


def _bridged(model: Counted, parallel: Parallel) -> "list[GPTModel]":
    import torch.distributed as dist

    from beam_rl.megatron.bridged import BridgedCheckpoint

    checkpoint = BridgedCheckpoint(str(model.folder))
    place = place_of(dist.get_rank(), parallel, model.config["mlp_layer_types"])
    dtype, device, fields = _fields(model, parallel)
    return checkpoint.build(checkpoint.megatron_config(dtype, device, place, None, **fields), place)


def check_names(model: Counted) -> None:
    """InputError where checkpoint and model have not the same tensors.

    With a rank for every expert, of which the first one is built: the others differ by the expert's number alone.
    """
    from beam_rl.megatron.bridged import BridgedCheckpoint

    experts = model.config["num_experts"]
    parallel = Parallel(dp=experts or 1, ep=experts or 1)
    checkpoint = BridgedCheckpoint(str(model.folder))
    with as_rank(0, parallel):
        names = checkpoint.names_of(build_on_meta(replace(model, adapter=None), parallel))
    every = (name.replace(".experts.0.", f".experts.{i}.") for name in names for i in range(experts or 1))
    checkpoint.check_names({*every})


def shape_of(chunks: "Sequence[GPTModel]") -> RankShape:
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


def _shapes(model: Counted, layouts: Sequence[Parallel]) -> Iterator[list[RankShape]]:
    """One rank's shape for each layout and stage: within a stage all are alike."""
    for parallel in layouts:
        shapes = []
        for stage in range(parallel.pp):
            with as_rank(stage * (parallel.ranks // parallel.pp), parallel):
                shapes.append(shape_of(build_on_meta(model, parallel)))
        yield shapes


def _main() -> None:
    """Reads an order from stdin; prints the shapes, or what the trainer would refuse."""
    order = json.loads(sys.stdin.read())
    adapter = order["adapter"] and Adapter(**order["adapter"] | {"targets": tuple(order["adapter"]["targets"])})
    model = Counted(order["config"], order["dtype"], adapter, order["folder"] and Path(order["folder"]))
    from beam_rl.megatron import compat

    compat.install()
    gc.disable()  # a quarter of the time would go into looking through modules that reference counts free
    answer: dict[str, Any] = {"refused": None, "unlike_on_gpu": False}
    try:
        if order["has_weights"]:
            check_names(model)
        shapes = _shapes(model, [Parallel(**layout) for layout in order["layouts"]])
        answer["shapes"] = [[asdict(shape) for shape in stages] for stages in shapes]
    except InputError as error:
        from beam_rl.megatron.bridged import UnlikeOnGpu

        answer = {"refused": str(error), "unlike_on_gpu": isinstance(error, UnlikeOnGpu)}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
