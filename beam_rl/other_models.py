"""Models other than Beam: whether a recipe can train one, and what of Beam's switches itself off for it.

A model trains if Megatron-Bridge builds it, vLLM serves it and transformers, through which both read it, has its class.
Pure functions of the recipe and the model's config.json, but for a look at what the installed libraries list.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from beam_rl.checkpoint_shapes import stored_names
from beam_rl.lora import Adapter, adapter_modules
from beam_rl.model_config import architectures, experts_of, is_beam
from beam_rl.recipe.tree import Recipe


def unknown(config: Mapping[str, Any]) -> str | None:
    """Which library does not know the model; None: all do, or it is Beam."""
    if is_beam(config):
        return None
    from beam_rl.megatron.compat import bridge_module
    from beam_rl.rollout.compat import knows_architecture

    named = architectures(config)
    if not named:
        return "names no architecture in its config.json"
    if bridge_module(named[0]) is None:
        return f"holds {named[0]}, which the installed Megatron-Bridge does not build as a plain GPT model"
    if not knows_architecture(named[0]):
        return f"holds {named[0]}, which the installed vLLM does not serve"
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as OWN

    if named[0] not in OWN.values():
        return f"holds {named[0]}, which the installed transformers has no class for; code from a checkpoint is not run"
    return None


def refusals(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[str]:
    """Of a recipe for another model than Beam, what is Beam's alone or was never tried: a sentence each, with the key."""
    if is_beam(config):
        return
    name = architectures(config)[0]
    for key, precision in (("trainer", recipe.trainer.precision), ("rollout", recipe.rollout_precision)):
        if precision == "mxfp8":
            yield f"{key}.precision = mxfp8: the scheme is of Beam's weights, and model.path holds {name}; use bf16"


def unadapted(adapter: Adapter | None, config: Mapping[str, Any], folder: Path) -> str | None:
    """What keeps an adapter from another model than Beam: projections of other names. None: nothing does."""
    if adapter is None or is_beam(config):
        return None
    stored = stored_names(folder, config)
    missing = [m.name for m in adapter_modules(adapter, config) if f"{m.name}.weight" not in stored]
    if not missing and adapter.targets:
        return None
    what = f"its checkpoint has no {missing[0]}" if missing else "it has none of model.lora.targets"
    return f"model.lora: {architectures(config)[0]} can't have an adapter here: {what}; leave model.lora out"


def fitted(recipe: Recipe, config: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe with what the model has no use for switched off, and a line about each."""
    if not recipe.rollout.routing_replay or experts_of(config):
        return recipe, []
    rollout = recipe.rollout.model_copy(update={"routing_replay": False})
    return recipe.model_copy(update={"rollout": rollout}), [
        f"rollout.routing_replay is off: {architectures(config)[0]} has no experts"
    ]
