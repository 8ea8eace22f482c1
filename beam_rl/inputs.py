"""What a run reads before any engine starts: the checkpoint's folder, its tokenizer, prompts. Mistakes end here."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from beam_rl.adapter_files import read_adapter
from beam_rl.data import PromptStream, read_prompts
from beam_rl.environments import make_environments
from beam_rl.environments.frame import Frame, find_frame
from beam_rl.errors import InputError
from beam_rl.layout import check_layout
from beam_rl.lora import Adapter, adapter_of, targets_in
from beam_rl.model_config import experts_of, full_config, is_beam, named_as_beams, with_defaults
from beam_rl.mxfp8.scheme import Scheme, scheme_of
from beam_rl.other_models import fitted, refusals, unadapted, unknown
from beam_rl.plan.tensors import stored_tensors
from beam_rl.plan.work import Work, work_of
from beam_rl.recipe.tree import DataSource, Recipe
from beam_rl.samples import Prompt
from beam_rl.step import Display, Phase
from beam_rl.verifiers import check_verifier

# Variants that Beam's config.json can name and Beam itself does not have.
UNSUPPORTED = {"norm_topk_prob": True, "attention_bias": False, "tie_word_embeddings": False}

# What a config.json says of how its weights are stored, and not of the model.
FORM = {"quantization_config", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"}


@dataclass
class Inputs:
    recipe: Recipe  # for this model: what it has no use for is switched off
    model_path: Path
    is_beam: bool
    num_experts: int  # 0: a dense model
    prompts: PromptStream
    eval_prompts: list[Prompt]
    eval_task: str
    notes: list[str]  # what became of the data sets' rows
    decode: Callable[[Sequence[int]], str]  # token ids → text without special tokens
    frame: Frame | None  # what the chat template puts around an environment's answers
    work: Work | None  # of a token in the model; None where nobody trains it


def prepare(recipe: Recipe, display: Display, trains: bool = True) -> Inputs:
    """Finds or makes the checkpoint, reads the data, and checks both.

    Args:
        display: shows that a small checkpoint is being made.
        trains: whether there will be a trainer, which knows fewer models than engines do.
    Raises:
        InputError: a missing folder, a model that can't be trained, data that can't serve, a reward that can't be loaded.
    """
    check_verifier(recipe.verifier)
    if recipe.environment:
        make_environments(recipe.environment).close()
    path = find_model(recipe, display)
    config = check_checkpoint(path)
    check_config_for(recipe, config)
    engine_model(recipe, path)
    if problem := unadapted(adapter_for(recipe, path), config, path):
        raise InputError(problem)
    if trains:
        check_built(recipe, path, config)
    recipe, switched_off = fitted(recipe, config)
    from transformers import AutoTokenizer

    from beam_rl.rollout.completion import stop_ids

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as e:
        raise InputError(f"model.path = {path}: no tokenizer that can be read ({str(e).splitlines()[0]})") from None
    longest, data, rows = recipe.data.max_prompt_tokens, recipe.data, recipe.environment is not None
    train = PromptStream.open(_resolve(data.train, path, "train"), tokenizer, longest, recipe.seed, "data.train", rows)
    notes = [f"{data.train.path}: {len(train)} prompts to train on ({train.counts})"]
    notes += start_note(path) + switched_off
    held_out: list[Prompt] = []
    if data.eval:
        held_out, counts = read_prompts(_resolve(data.eval, path, "eval"), tokenizer, longest, "data.eval", rows)
        notes.append(f"{data.eval.path}: {len(held_out)} prompts to evaluate on ({counts})")
    return Inputs(
        recipe=recipe,
        model_path=path,
        is_beam=is_beam(config),
        num_experts=experts_of(config),
        prompts=train,
        eval_prompts=held_out,
        eval_task=(data.eval.task or Path(data.eval.path).stem) if data.eval else "",
        notes=notes,
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        frame=find_frame(tokenizer, recipe.environment.role, stop_ids(str(path))) if recipe.environment else None,
        work=_work(path, config) if trains else None,
    )


def _work(path: Path, config: dict[str, Any]) -> Work:
    return work_of(config if is_beam(config) else named_as_beams(config), stored_tensors(path, config))


def find_model(recipe: Recipe, display: Display) -> Path:
    """The folder of `model.path`: made (`tiny`, `small`, `small256`), local, or downloaded from the hub."""
    from beam_rl.tiny.sizes import SIZES

    name = recipe.model.path
    return _made(name, recipe, display) if name in SIZES else _folder(name, "model.path", recipe.model.revision)


def engine_model(recipe: Recipe, model_path: Path) -> Path:
    """The folder that engines load: the trainer's, or the frozen base in another form.

    Raises:
        InputError: `rollout.checkpoint` is not to be had, or belongs to another model.
    """
    name = recipe.rollout.checkpoint
    if name is None:
        return model_path
    folder = _folder(name, "rollout.checkpoint")
    # With defaults filled in: a quantizer may have written out what was left to them.
    here, there = (with_defaults(path) for path in (model_path, folder))
    for key in sorted({*here, *there} - FORM):
        if here.get(key) != there.get(key):
            raise InputError(
                f"rollout.checkpoint = {name}: not the model at model.path: its config.json says {key} = "
                f"{there.get(key)}, there it is {here.get(key)}"
            )
    return folder


def _folder(name: str, key: str, revision: str | None = None) -> Path:
    """Local, or downloaded from the hub."""
    if Path(name).is_dir():
        return Path(name).resolve()
    if os.sep in name and (name.startswith((".", os.sep)) or name.count("/") > 1):
        raise InputError(f"{key} = {name}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        reason = str(e).splitlines()[0]
        raise InputError(f"{key} = {name}: neither a folder nor a model the hub can give ({reason})") from None


def _made(name: str, recipe: Recipe, display: Display) -> Path:
    """The small checkpoint of that name; what goes on is shown only where it has to be made."""
    from beam_rl.tiny import cached_tiny
    from beam_rl.tiny.sizes import SIZES

    with contextlib.ExitStack() as shown:
        phase: Phase | None = None

        def progress(step: int, steps: int, loss: float) -> None:
            nonlocal phase
            phase = phase or shown.enter_context(display.phase(f"warm-starting the {name} Beam", steps, once=True))
            phase.advance()

        try:
            return cached_tiny(recipe.seed, recipe.trainer.dtype, progress, size=SIZES[name])
        except ValueError as e:
            raise InputError(f"model.path = {name}: {e}") from None


def start_note(path: Path) -> list[str]:
    """How good a checkpoint is that was warm-started to a target: one line, or none."""
    from beam_rl.tiny.cache import REPORT

    try:
        return [str(json.loads((path / REPORT).read_text())["summary"])]
    except FileNotFoundError:
        return []


def check_checkpoint(path: Path) -> dict[str, Any]:
    """The config.json of a checkpoint that has weights, of a model that can be trained."""
    config = check_config(path)
    if not list(path.glob("*.safetensors")):
        raise InputError(f"model.path = {path}: has no .safetensors files")
    return config


def check_config(path: Path) -> dict[str, Any]:
    """The config.json in that folder, if it is Beam's or of another model that Megatron-Bridge and vLLM know."""
    file = path / "config.json"
    config = _config(file)
    if problem := unknown(config):
        raise InputError(f"model.path = {path}: {problem}")
    for key, wanted in UNSUPPORTED.items() if is_beam(config) else ():
        if config.get(key, wanted) != wanted:
            raise InputError(f"{file}: {key} = {config[key]}: only {wanted} is supported")
    return full_config(path)


def _config(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(f"{file.parent}: no config.json there, so it is no HF checkpoint") from None
    except (OSError, TypeError, ValueError) as e:
        raise InputError(f"{file}: can't be read: {e}") from None


def adapter_for(recipe: Recipe, model_path: Path) -> Adapter | None:
    """The adapter that the recipe trains on that checkpoint; InputError if its rank does not fit, None for all weights."""
    return _adapter(recipe, full_config(model_path))


def _adapter(recipe: Recipe, config: dict[str, Any]) -> Adapter | None:
    if recipe.model.lora is None:
        return None
    try:
        adapter = adapter_of(recipe.model.lora, config.get("num_experts_per_tok") or 1)
    except ValueError as e:
        raise InputError(str(e)) from None
    return replace(adapter, targets=targets_in(config, adapter.targets))


def scheme_for(recipe: Recipe, model_path: Path) -> Scheme | None:
    """Which of that checkpoint's weights engines have in MXFP8, None where none is; InputError if some rank's or worker's
    part of a weight is no whole number of blocks."""
    return _scheme(recipe, json.loads((model_path / "config.json").read_text(encoding="utf-8")))


def _scheme(recipe: Recipe, config: dict[str, Any]) -> Scheme | None:
    if recipe.rollout_precision != "mxfp8":
        return None
    hf = SimpleNamespace(**config)
    kept, engine, trainer = recipe.trainer.mxfp8, recipe.rollout.parallel, recipe.trainer.parallel
    split = {"rollout.precision": (engine.tp, 1 if engine.ep > 1 else engine.tp)}
    if recipe.trainer.precision == "mxfp8":
        split = {"trainer.precision": (trainer.tp, trainer.etp)} | split
    for key, (tp, expert_tp) in split.items():
        try:
            scheme = scheme_of(hf, kept.keep_first_layers, kept.keep_last_layers, kept.activations, tp, expert_tp)
        except ValueError as e:
            raise InputError(f"{key} = mxfp8: {e}") from None
    return scheme


def check_config_for(recipe: Recipe, config: dict[str, Any]) -> tuple[Adapter | None, Scheme | None]:
    """What the recipe trains and quantizes of a model with this config.json; InputError for the first that does not fit."""
    for problem in refusals(recipe, config):
        raise InputError(problem)
    adapter, scheme = _adapter(recipe, config), _scheme(recipe, config)
    for problem in (*check_layout(config, recipe.trainer.parallel, adapter), *check_length(config, recipe)):
        raise InputError(problem)
    return adapter, scheme


def check_built(recipe: Recipe, model_path: Path, config: dict[str, Any]) -> None:
    """InputError for what a trainer of another model than Beam would find out once it has built it, such as its RoPE."""
    if is_beam(config):
        return
    from beam_rl.doctor import find_gpus
    from beam_rl.plan.model_shapes import Counted, check_buildable

    counted = Counted(named_as_beams(config), recipe.trainer.dtype, _adapter(recipe, config), model_path)
    may_have_gpus = recipe.cluster.gpu is not None or recipe.cluster.address != "local"
    check_buildable(counted, recipe.trainer.parallel, may_have_gpus or bool(find_gpus()))


def start_adapter(recipe: Recipe) -> str | None:
    """The absolute path of the adapter folder that training starts from."""
    folder = recipe.model.lora.adapter if recipe.model.lora else None
    return None if folder is None else str(Path(folder).resolve())


def check_start_adapter(recipe: Recipe, model_path: Path) -> None:
    """InputError if the recipe starts from an adapter that isn't one for this model."""
    adapter, folder = adapter_for(recipe, model_path), start_adapter(recipe)
    if adapter and folder:
        read_adapter(Path(folder), adapter, full_config(model_path), model_path)


def check_length(config: dict[str, Any], recipe: Recipe) -> Iterator[str]:
    """Whether the model has a position for every token of the longest sample."""
    longest, positions = (
        recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens,
        config.get("max_position_embeddings"),
    )
    if positions and longest > positions:
        yield (
            f"rollout.max_response_tokens = {recipe.rollout.max_response_tokens}: with data.max_prompt_tokens the longest "
            f"sample has {longest} tokens, and the model has {positions} positions; use at most "
            f"{positions - recipe.data.max_prompt_tokens}"
        )


def _resolve(source: DataSource, model_path: Path, which: str) -> DataSource:
    """The name of a small Beam stands for the file that its checkpoint brings."""
    from beam_rl.tiny.sizes import SIZES

    if source.path not in SIZES:
        return source
    file = model_path / f"{which}.jsonl"
    if not file.exists():
        raise InputError(
            f"data.{which}.path = {source.path}: goes with model.path = {source.path} only, {file} does not exist"
        )
    return source.model_copy(update={"path": str(file), "split": "train"})
