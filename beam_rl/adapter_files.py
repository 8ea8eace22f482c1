"""An adapter as a folder that stock PEFT and stock vLLM load, read back, and added to the weights.

Both load one form only as it is meant (others load without a word and compute something else): a tensor for each expert's
projection, `r` and `lora_alpha` the experts', the larger ranks as patterns, and every matrix that PEFT would take for an
expert's by its last name as a target parameter. No scale is folded into a tensor. What the adapter consists of is
`beam_rl.lora`'s; knows nothing about Megatron.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.files import whole_folder
from beam_rl.lora import (
    ATTENTION_INPUTS,
    ATTENTION_OUTPUT,
    DENSE_INPUTS,
    DENSE_OUTPUT,
    EXPERTS,
    Adapter,
    AdapterModule,
    adapter_modules,
    adapter_tensors,
    repeated_tensors,
)
from beam_rl.model_config import experts_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE = "base_identity"  # what the weights file notes of the checkpoint it was trained on
IDENTITY_BLOCKS = 64  # of a file, that `identity` reads
# PEFT knows targets by their last name, and takes these for the experts of a model like Beam.
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


def adapter_config(adapter: Adapter, base: str, has_experts: bool = True) -> dict[str, Any]:
    """PEFT's adapter_config.json. `base`: where the base model is, noted for the reader. has_experts: the model."""
    experts = EXPERTS[0] in adapter.targets
    dense = [target for target in adapter.targets if target not in EXPERTS]
    parameters = [target for target in dense if has_experts and target.rpartition(".")[2] in EXPERT_NAMES]
    modules = [target.rpartition(".")[2] for target in dense if target not in parameters]
    if experts:
        modules += EXPERT_NAMES
    patterns = [pattern for pattern, targets in _PATTERNS.items() if experts and set(targets) & set(dense)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.expert_rank if experts else adapter.rank,
        "lora_alpha": adapter.expert_alpha if experts else adapter.alpha,
        "target_modules": modules,
        "target_parameters": [f"{target}.weight" for target in parameters],
        "rank_pattern": dict.fromkeys(patterns, adapter.rank),
        "alpha_pattern": dict.fromkeys(patterns, adapter.alpha),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }


_PATTERNS = {  # regular expressions; PEFT knows a target parameter with its ".weight"
    r"self_attn\.(q|k|v|o|gate)_proj(\.weight)?": (*ATTENTION_INPUTS, *ATTENTION_OUTPUT),
    r"mlp\.(gate|up|down)_proj(\.weight)?": (*DENSE_INPUTS, *DENSE_OUTPUT),
}


def write_adapter(
    tensors: Iterable[tuple[str, Tensor]], adapter: Adapter, config: Mapping[str, Any], folder: Path, base: str
) -> None:
    """Writes the folder; it appears under its name when it is complete.

    Args:
        tensors: by HF name, those of `adapter_tensors(adapter, config)`; repeated ones may be missing.
        config: the base checkpoint's config.json. base: where that is, for adapter_config.json.
    Raises:
        InputError: the folder exists and is not empty. ValueError: a tensor is missing, unknown or of another shape.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder} exists already: export to a new folder")
    found = {name: tensor.detach().cpu() for name, tensor in tensors}
    for name, same in repeated_tensors(adapter, config).items():
        found.setdefault(name, found[same])
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if shapes != adapter_tensors(adapter, config):
        raise ValueError("these are not the tensors of this adapter")
    # safetensors stores no tensor twice under two names, so each is a copy
    whole = {PREFIX + name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}
    with whole_folder(folder) as partial:
        save_file(whole, partial / WEIGHTS, metadata={"format": "pt", BASE: identity(Path(base))})
        (partial / CONFIG).write_text(
            json.dumps(adapter_config(adapter, base, experts_of(config) > 0), indent=2) + "\n"
        )


def identity(checkpoint: Path) -> str:
    """A digest that tells a checkpoint from others, also from a further trained one, without reading it all: of its
    config, and of each weights file's size and some of its bytes."""
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for file in sorted(checkpoint.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for block in range(IDENTITY_BLOCKS):  # the first one has the header
                stream.seek(size * block // IDENTITY_BLOCKS)
                digest.update(stream.read(4096))
    return digest.hexdigest()


def read_adapter(
    folder: Path, adapter: Adapter, config: Mapping[str, Any], base: Path | None = None
) -> dict[str, Tensor]:
    """The tensors of an adapter folder, by the names of `adapter_tensors`, in their own dtype.

    Args:
        adapter, config: what it must be: the recipe's adapter, on the base with this config.json.
        base: the checkpoint's folder, to compare with the one that the adapter was trained on, where that is noted.
    Raises:
        InputError: in one line: a file is missing or broken; the adapter is for another base, has other targets, ranks or
            scales; it has separate A's where the trainer has one; a value is not finite.
    """
    where = f"model.lora.adapter = {folder}"
    found, settings = _tensors(folder, where), _settings(folder, where)
    expected = adapter_tensors(adapter, config)
    for what, names in (("lacks", expected.keys() - found.keys()), ("has the unknown", found.keys() - expected.keys())):
        if names:
            raise InputError(
                f"{where}: the adapter {what} {min(names)} ({len(names)} such tensors): it is for another base model or "
                "other model.lora.targets"
            )
    for module in adapter_modules(adapter, config):
        _check_shape(where, module, found)
        _check_scale(where, module, settings)
    for name, same in repeated_tensors(adapter, config).items():
        if not torch.equal(found[name], found[same]):
            raise InputError(f"{where}: {name} differs from {same}, but the trainer has one A for both")
    if base is not None:
        _check_base(where, folder, base)
    broken = [name for name, tensor in found.items() if not tensor.isfinite().all()]
    if broken:
        raise InputError(f"{where}: {broken[0]} has values that are not finite ({len(broken)} such tensors)")
    return found


def _tensors(folder: Path, where: str) -> dict[str, Tensor]:
    try:
        stored = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise InputError(f"{where}: no {WEIGHTS} there") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{where}: {WEIGHTS} can't be read: {error}") from None
    return {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}


def _check_base(where: str, folder: Path, base: Path) -> None:
    """Only our own folders note their base; a foreign adapter that fits is taken at its word."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        noted = (file.metadata() or {}).get(BASE)
    if noted not in (None, identity(base)):
        raise InputError(f"{where}: was trained on another checkpoint than model.path, {base} (see its {CONFIG})")


def _settings(folder: Path, where: str) -> dict[str, Any]:
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if settings["r"] and settings["lora_alpha"]:
            return settings
    except FileNotFoundError:
        raise InputError(f"{where}: no {CONFIG} there") from None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{where}: {CONFIG} is not a LoRA adapter's, with r and lora_alpha")


def _check_shape(where: str, module: AdapterModule, found: Mapping[str, Tensor]) -> None:
    a, b = tuple(found[module.a].shape), tuple(found[module.b].shape)
    if (a, b) == ((module.rank, module.inputs), (module.outputs, module.rank)):
        return
    if len(a) == len(b) == 2 and a[0] == b[1] != module.rank:
        raise InputError(f"{where}: {module.name} has rank {a[0]}, but model.lora makes it {module.rank}")
    raise InputError(
        f"{where}: {module.name} is {b} · {a}, but on this model {module.outputs} × {module.inputs} at rank "
        f"{module.rank}: it is for another base model"
    )


def _check_scale(where: str, module: AdapterModule, settings: Mapping[str, Any]) -> None:
    def of(default: str, patterns: str) -> float:
        known: Mapping[str, float] = settings.get(patterns) or {}
        matching = (value for key, value in known.items() if re.match(rf"(.*\.)?({key})$", module.name))
        return float(next(matching, settings[default]))

    try:
        rank, alpha = of("r", "rank_pattern"), of("lora_alpha", "alpha_pattern")
        scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    except (re.error, AttributeError, TypeError, ValueError, ZeroDivisionError):
        raise InputError(f"{where}: the ranks and alphas in its {CONFIG} make no sense for {module.name}") from None
    if abs(scale - module.scale) > 1e-6 * module.scale:
        raise InputError(f"{where}: {module.name} has scale {scale:g}, but model.lora makes it {module.scale:g}")


def merged(
    weights: Iterable[tuple[str, Tensor]],
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    config: Mapping[str, Any],
) -> Iterator[tuple[str, Tensor]]:
    """The base's `weights`, each with what the adapter adds: W + alpha/rank · B·A in FP32, rounded once to W's dtype.

    tensors: the adapter's; repeated ones may be missing.
    """
    modules = {f"{module.name}.weight": module for module in adapter_modules(adapter, config)}
    for name, weight in weights:
        if module := modules.get(name):
            a = tensors[module.shared_a]
            b = tensors[module.b]
            added = b.to(weight.device, torch.float) @ a.to(weight.device, torch.float)
            weight = (weight.float() + module.scale * added).to(weight.dtype)
        yield name, weight
