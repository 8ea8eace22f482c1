"""Writes a stream of HF-named tensors as a checkpoint folder that transformers and vLLM load.

Tensors go to disk as they come, in files of bounded size; the folder appears under its name only when it is complete.
Knows nothing about Megatron.
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.files import whole_folder
from beam_rl.mxfp8.scheme import Scheme

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


def export_checkpoint(
    tensors: Iterable[tuple[str, Tensor]],
    source: Path,
    target: Path,
    dtype: torch.dtype,
    scheme: Scheme | None = None,
    file_bytes: int = 4 * 2**30,
) -> None:
    """Writes `tensors`, and what else the source checkpoint has (config, tokenizer), to `target`.

    Args:
        dtype: noted in config.json as the weights' dtype.
        scheme: has the weights that it names written in MXFP8.
        file_bytes: largest size of a file with several tensors.
    Raises:
        InputError: `target` exists and is not an empty folder.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise InputError(f"{target} exists already: export to a new folder")
    with whole_folder(target) as partial:
        files = _write_files(scheme.quantized(tensors) if scheme else tensors, partial, file_bytes)
        _name_files(partial, files)
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copy(file, partial / file.name)
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        if scheme:
            config["quantization_config"] = scheme.hf_config()
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_files(tensors: Iterable[tuple[str, Tensor]], folder: Path, file_bytes: int) -> list[dict[str, int]]:
    """Writes 0.safetensors, 1.safetensors, … and returns the sizes in bytes of each one's tensors, by name."""
    files: list[dict[str, int]] = []
    waiting: dict[str, Tensor] = {}
    size = 0

    def write() -> None:
        save_file(waiting, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        files.append({name: tensor.nbytes for name, tensor in waiting.items()})
        waiting.clear()

    for name, tensor in tensors:
        if waiting and size + tensor.nbytes > file_bytes:
            write()
            size = 0
        waiting[name] = tensor.detach().cpu().clone().contiguous()
        size += tensor.nbytes
    write()
    return files


def _name_files(folder: Path, files: list[dict[str, int]]) -> None:
    """HF's names: model.safetensors, or numbered files and an index."""
    if len(files) == 1:
        os.replace(folder / "0.safetensors", folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, sizes in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        os.replace(folder / f"{number}.safetensors", folder / name)
        where |= dict.fromkeys(sizes, name)
    total = sum(sum(sizes.values()) for sizes in files)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
