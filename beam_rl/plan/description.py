"""The shape of the model that a recipe names, without its weights: all that a plan needs of a checkpoint.

A folder needs no more than its config.json; a small Beam is not made for it; of a hub id the config.json alone is asked for.
"""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from beam_rl.errors import InputError
from beam_rl.inputs import check_config
from beam_rl.model_config import is_beam, named_as_beams
from beam_rl.plan.tensors import NotCounted, Stored, beam_tensors, other_tensors
from beam_rl.recipe.tree import Recipe

BEAM_501B = "reflection/Beam-1.0-501B-A23B"
BEAM_501B_POSITIONS = 2**20  # transformers' default is shorter than the published model's context


@dataclass(frozen=True)
class Description:
    config: dict[str, Any]  # as config.json has it, with Beam's names
    source: str  # where it comes from, for people
    folder: Path | None = None  # of another model than Beam: where its config.json is

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """The checkpoint's, by their names."""
        if self.folder is None:
            return beam_tensors(self.config)
        try:
            return other_tensors(self.folder)
        except Exception as error:  # whatever the model's own class raises without memory
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise NotCounted(f"{self.source}: can't be built without memory, so it has no plan ({reason[0]})") from None


def describe(recipe: Recipe) -> Description:
    """The model's config.json. InputError if there is none, or nobody can train it."""
    from beam_rl.tiny.sizes import SIZES

    name = recipe.model.path
    if name in SIZES:
        from beam_rl.tiny.checkpoint import tiny_config

        return Description(_plain(tiny_config(SIZES[name])), f"the {name} Beam")
    if Path(name).is_dir():
        return _of_folder(Path(name).resolve(), str(Path(name).resolve() / "config.json"))
    if os.sep in name and (name.startswith((".", os.sep)) or name.count("/") > 1):
        raise InputError(f"model.path = {name}: no such folder")
    return _from_hub(name, recipe.model.revision)


def _from_hub(name: str, revision: str | None) -> Description:
    """From the hub's cache, else (for the published model, whose shape transformers knows) without asking the hub at all."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(cached, str) and name == BEAM_501B and revision is None:
            return Description(beam_501b(), f"{name}, as transformers' BeamConfig describes it")
        file = Path(cached if isinstance(cached, str) else hf_hub_download(name, "config.json", revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"model.path = {name}: neither a folder nor a model the hub can give ({reason})") from None
    return _of_folder(file.parent, f"{name}, config.json of the hub")


def _of_folder(folder: Path, source: str) -> Description:
    config = check_config(folder)
    return Description(config, source) if is_beam(config) else Description(named_as_beams(config), source, folder)


def beam_501b() -> dict[str, Any]:
    """The published model's config.json: the defaults of transformers' BeamConfig are its shape."""
    from transformers import BeamConfig

    config = BeamConfig(max_position_embeddings=BEAM_501B_POSITIONS, architectures=["BeamForCausalLM"])
    return _plain(config)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with this config.json and nothing else; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return file


def _plain(config: Any) -> dict[str, Any]:
    """As it would be read back from a file."""
    return json.loads(config.to_json_string(use_diff=False))
