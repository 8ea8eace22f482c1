"""Every place where we reach into Megatron-core or Megatron-Bridge beyond their public interface.

`install()` makes both importable and runnable on the machine at hand: without Transformer Engine, and on a plain CPU
with gloo. It changes nothing at import, refuses versions that these remedies were not written for, and may be called
again. Call it before importing Megatron or any other module of this package. Knows nothing about Beam.
"""

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

VERSIONS = {"megatron-core": "0.19.", "megatron-bridge": "0.6."}
_TE_LAYERS = "megatron.bridge.peft.lora_layers"
_CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Checks the versions and applies the remedies that this machine needs, in the thread that will use Megatron.

    Raises:
        RuntimeError: another version of Megatron-core or Megatron-Bridge is installed.
    """
    global _installed
    if _installed:
        return
    check_versions({name: importlib.metadata.version(name) for name in VERSIONS})
    on_cpu = not torch.cuda.is_available()
    without_te = importlib.util.find_spec("transformer_engine") is None
    if on_cpu:
        _cpu_for_cuda()
    _bare_bridge_packages()
    if without_te:
        sys.meta_path.insert(0, _WithoutTransformerEngine())
    with _quick_import(on_cpu):
        importlib.import_module("megatron.core.models.gpt.gpt_model")
        importlib.import_module("megatron.bridge.models.conversion.auto_bridge")
    # In every process it advises to move to a newer model class.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    if without_te:
        _correct_bridge_te_flags()
    if on_cpu:
        _cpu_random_states()
        _cpu_token_dispatch()
        _uneven_collectives_on_gloo()
    _installed = True


def require_installed() -> None:
    """Raises RuntimeError unless `install()` ran: the other modules import Megatron, which needs it."""
    if not _installed:
        raise RuntimeError("call beam_rl.megatron.compat.install() before importing beam_rl.megatron's other modules")


def check_versions(found: dict[str, str]) -> None:
    """Raises RuntimeError for the first package of `found` whose version these remedies were not written for."""
    for name, prefix in VERSIONS.items():
        if not found[name].startswith(prefix):
            raise RuntimeError(
                f"{name} {found[name]} is installed, but beam_rl/megatron/compat.py was written for {prefix}x: "
                f"install {name}=={prefix}* or check each remedy there against {found[name]}"
            )


def bridge_module(architecture: str) -> str | None:
    """The module of Bridge's that registers a plain GPT model for a checkpoint of this class; None if none does.

    Read from Bridge's files: importing all its families takes 10 s, and some of them what is not installed. Nothing of
    Megatron is imported, so it may be asked before `install`.
    """
    for file in importlib.metadata.files("megatron-bridge") or ():
        if file.parts[:3] != ("megatron", "bridge", "models") or file.suffix != ".py":
            continue
        text = Path(str(file.locate())).read_text(encoding="utf-8")
        if architecture in text and architecture in _registered(ast.parse(text)):
            return ".".join(file.with_suffix("").parts)
    return None


def _registered(tree: ast.Module) -> set[str]:
    """Names of the HF classes that a module of Bridge's registers its own class for, with Megatron's GPTModel."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = set()
    for node in (node for cls in tree.body if isinstance(cls, ast.ClassDef) for node in cls.decorator_list):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_bridge")):
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        source, target = given.get("source"), given.get("target")
        if isinstance(target, ast.Name) and target.id == "GPTModel":
            name = source.id if isinstance(source, ast.Name) else str(getattr(source, "value", ""))
            found.add(str(constants.get(name, name)))
    return found


def use_groups(provider: Any) -> None:
    """Has one of Bridge's model providers build for the groups of ranks that Megatron knows; only its own `initialize`
    would tell it."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()


def amend(auto_bridge: Any) -> None:
    """Has an AutoBridge's class of bridge write no progress bars, for a trainer among many has no terminal, and know the
    names of experts that are computed one by one, as without Transformer Engine: many families lack them."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping

    def single(mapping: Any) -> Any:
        """For one expert what Bridge has for all of them together; None where that is another kind of mapping."""
        name = _single_expert(mapping.megatron_param)
        if type(mapping) is GatedMLPMapping:
            return GatedMLPMapping(name, **mapping.hf_param)
        return AutoMapping(name, mapping.hf_param, mapping.permute_dims) if type(mapping) is AutoMapping else None

    def mapping_registry(self: Any) -> Any:
        known = listed(self).mappings
        names = {mapping.megatron_param for mapping in known}
        grouped = [m for m in known if _single_expert(m.megatron_param) not in names]
        added = [one for m in grouped if (one := single(m)) is not None]
        return MegatronMappingRegistry(*known, *added)

    bridge: Any = type(auto_bridge._model_bridge)
    if hasattr(bridge, "amended"):
        return
    listed, bridge.amended = bridge.mapping_registry, True
    bridge.mapping_registry = mapping_registry
    bridge._with_progress_tracking = lambda self, tasks, description, show_progress=True: tasks


def _single_expert(name: str) -> str:
    """Megatron's name of one expert's weight, from that of all experts together; any other name as it is."""
    return re.sub(r"mlp\.experts\.(linear_fc[12])\.weight\*$", r"mlp.experts.local_experts.*.\1.weight", name)


def has_transformer_engine() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


# --- a CPU in the place of a GPU --------------------------------------------------------------------------


class _NoStream:
    """Stands for torch.cuda.Stream and Event: on a CPU everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, *args: Any) -> "_NoStream":
        return self

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = synchronize = record = wait = wait_stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    def __hash__(self) -> int:
        return 0


def _is_cuda(value: object) -> bool:
    return value == "cuda" or (isinstance(value, torch.device) and value.type == "cuda")


class _CudaMeansCpu(TorchFunctionMode):
    """Megatron 0.19 writes `device="cuda"` into its schedules and optimizers, compares `Tensor.type()`, and moves a head
    that is the embedding of another pipeline stage by `Tensor.cuda()`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


def _cpu_for_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = lambda *args, **kwargs: _NoStream()
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    _CudaMeansCpu().__enter__()


def _cpu_random_states() -> None:
    """Activation recomputation saves and restores the GPU's random state; here that is the CPU's."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _cpu_token_dispatch() -> None:
    """The dispatcher turns its split sizes into numbers while it moves them from the GPU; on a CPU it leaves tensors."""
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = move


def _uneven_collectives_on_gloo() -> None:
    """Expert tensor parallelism gathers and reduces as many rows as each rank has; gloo wants equally many of all."""
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def uneven_gather(rows: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(rows, group, None, use_global_buffer)
        padded = rows.new_zeros(max(output_split_sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(found, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(found, output_split_sizes, strict=True)])

    def uneven_reduce(rows: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(rows, group, None, use_global_buffer)
        total = rows.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = uneven_gather, uneven_reduce


# --- the distributed optimizer ----------------------------------------------------------------------------


def optimizer_shards(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor, int]]:
    """This rank's parts of a Megatron `DistributedOptimizer`'s parameters: (parameter, FP32 part, where it begins).

    Megatron 0.19 finds a part by its index in Adam's group, which is wrong for a group of both BF16 and FP32 parameters.
    """
    starts = {
        parameter: ranges["param"].start
        for buffer in optimizer.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    }
    whole = (*optimizer.model_fp32_groups, *optimizer.model_float16_groups)
    parts = (*optimizer.shard_fp32_groups, *optimizer.shard_fp32_from_float16_groups)
    for parameters, mains in zip(whole, parts, strict=True):
        for parameter, main in zip(parameters, mains, strict=True):
            yield parameter, main, starts[parameter]


def replace_adam(optimizer: Any, adam: Any) -> None:
    """Makes one of Megatron's optimizers call `adam.step()`, which writes the weights itself, and frees its FP32 copies.

    Megatron 0.19 would copy every main parameter into its weight after the step; those have no memory any more. They
    stay in its lists with their shapes, since it hands gradients and clipping over on them.
    """
    optimizer.optimizer = adam
    optimizer._copy_main_params_to_model_params = lambda: None
    names = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
    for main in (main for name in names for group in getattr(optimizer, name, ()) for main in group):
        main.untyped_storage().resize_(0)


# --- what they import -------------------------------------------------------------------------------------


def _bare_bridge_packages() -> None:
    """Bridge 0.6 imports all its model families (and what those need) with its first module: 10 s, and we add our own.

    Its packages come into being here without running their `__init__`; their modules are imported as usual.
    """
    for name in ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.models.conversion"):
        spec = importlib.machinery.PathFinder.find_spec(name, _search_path(name))
        if spec is None or spec.submodule_search_locations is None:
            raise RuntimeError(f"{name} is not a package in the installed megatron-bridge")
        package = types.ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package


def _search_path(name: str) -> list[str] | None:
    parent = name.rpartition(".")[0]
    return list(importlib.import_module(parent).__path__) if parent else None


@contextlib.contextmanager
def _quick_import(on_cpu: bool) -> Iterator[None]:
    """Megatron-core 0.19 imports W&B for its timers, and torch.compile's machinery for functions that a CPU gains
    nothing from: half of the start. Both, and others, talk while they are imported."""
    logging.disable(logging.INFO)  # Bridge logs a traceback for each thing that is not installed
    root, level, handlers = (logging.getLogger(), logging.getLogger().level, logging.getLogger().handlers[:])
    compile_function = torch.compile
    wandb = sys.modules.get("wandb")
    sys.modules["wandb"] = None  # type: ignore[assignment]  # reads as "not installed"
    if on_cpu:
        torch.compile = lambda function=None, **_: function  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compile = compile_function
        logging.disable(logging.NOTSET)
        root.setLevel(level)  # one of the imports makes everybody's INFO visible
        root.handlers[:] = handlers
        del sys.modules["wandb"]
        if wandb is not None:
            sys.modules["wandb"] = wandb


# --- Bridge without Transformer Engine --------------------------------------------------------------------


class _WithoutTransformerEngine(importlib.abc.MetaPathFinder):
    """Bridge 0.6 imports Transformer Engine in one file (`peft/lora_layers.py`) without asking whether it is there."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _TE_LAYERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _WithEmptyTransformerEngine(name, spec.origin)
        return spec


class _WithEmptyTransformerEngine(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        # What the file imports besides is loaded first, so that nothing else takes the empty module for the real one.
        for dependency in ("core.transformer.moe.moe_utils", "bridge.peft.adapter_wrapper", "bridge.peft.lora_merge"):
            importlib.import_module(f"megatron.{dependency}")
        with _empty_transformer_engine():
            super().exec_module(module)


@contextlib.contextmanager
def _empty_transformer_engine() -> Iterator[None]:
    """A `transformer_engine` whose classes nothing is an instance of."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")
    top, pytorch, ops = (types.ModuleType(name) for name in names)
    for owner, classes in ((pytorch, ("Linear", "LayerNormLinear", "GroupedLinear")), (ops, ("Sequential",))):
        for name in classes:
            setattr(owner, name, type(name, (), {}))
    top.__dict__.update(pytorch=pytorch)
    pytorch.__dict__.update(ops=ops)
    sys.modules.update(zip(names, (top, pytorch, ops), strict=True))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _correct_bridge_te_flags() -> None:
    """Bridge 0.6 takes Megatron-core's `TELinear = None` and the like for Transformer Engine being there."""
    for name in ("megatron.bridge.peft.utils", "megatron.bridge.peft.module_matcher"):
        module = importlib.import_module(name)
        for flag in [flag for flag in vars(module) if flag.startswith("HAVE_TE")]:
            setattr(module, flag, False)
