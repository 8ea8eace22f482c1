"""Reads a recipe from YAML and `key=value` overrides; every mistake becomes one line that names the key.

Knows nothing about what the keys do.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from beam_rl.credentials import holds_secret
from beam_rl.errors import InputError
from beam_rl.recipe.tree import Recipe


class RecipeError(InputError):
    """Wrong input; the message is one line in the user's words."""


def load(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """Reads `path`, applies `a.b=value` overrides (values are YAML) in order, validates.

    Raises:
        RecipeError: one line that names the file or the key, the value, and what would do; also where a value is a secret.
    """
    return parse(overridden(_read(path), overrides))


def overridden(tree: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The tree itself, with `a.b=value` overrides applied."""
    for override in overrides:
        _set(tree, override)
    return tree


def parse(tree: Mapping[str, Any]) -> Recipe:
    """A plain tree of dicts to a `Recipe`; raises `RecipeError` for the first mistake."""
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as e:
        raise RecipeError(_explain(e.errors(), tree)) from None
    for key, value in _leaves(recipe.model_dump()):
        if holds_secret(str(value)):
            raise RecipeError(
                f"{key} holds a key or token, and a run's folder and W&B keep its recipe: put it into the environment"
            )
    return recipe


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every default spelled out; `load` reads it back to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise RecipeError(f"no such recipe: {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise RecipeError(f"{path}: can't be read: {e}") from None
    except yaml.YAMLError as e:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(e).split())}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values, this is a {type(tree).__name__}")
    return tree


def _set(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"override {override!r}: write key=value, for example trainer.steps=10")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RecipeError(f"override {key}={text}: the value is not valid YAML") from None
    *parents, leaf = key.split(".")
    node = tree
    for depth, name in enumerate(parents):
        child = node[name] = {} if node.get(name) is None else node[name]
        if not isinstance(child, dict):
            raise RecipeError(f"override {override}: {'.'.join(parents[: depth + 1])} is a value, not a section")
        node = child
    node[leaf] = value


def _explain(errors: list[Any], tree: Mapping[str, Any]) -> str:
    """The first error as one line. Unknown keys come first: they often cause the others."""
    error = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    path = [str(part) for part in error["loc"]]
    key, value = ".".join(path), _short(error.get("input"))
    match error["type"]:
        case "extra_forbidden":
            return f"unknown key {key}{_nearest(path)}"
        case "missing":
            return f"{key} is missing: {_description(path) or 'the recipe must give it'}"
        case "value_error" if not path:
            return str(error["ctx"]["error"])
    more = "" if len(errors) == 1 else f" (and {len(errors) - 1} more)"
    wants = error["msg"].replace("Input should be", "should be").replace("valid ", "")
    return f"{key} = {value}: {wants}{more}"


def _short(value: Any, limit: int = 60) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _section(path: list[str]) -> type[BaseModel] | None:
    """The section class at `path`, or None where the path leaves the tree."""
    node: type[BaseModel] = Recipe
    for name in path:
        field = node.model_fields.get(name)
        inner = next((a for a in _classes(field.annotation) if issubclass(a, BaseModel)), None) if field else None
        if inner is None:
            return None
        node = inner
    return node


def _classes(annotation: Any) -> list[type]:
    if isinstance(annotation, type):
        return [annotation]
    return [c for a in getattr(annotation, "__args__", ()) for c in _classes(a)]


def _description(path: list[str]) -> str | None:
    section = _section(path[:-1])
    field = section.model_fields.get(path[-1]) if section else None
    return field.description if field else None


def leaf_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Every key of the tree in dotted form, leaves only."""
    keys = []
    for name in section.model_fields:
        inner = _section([*prefix.split("."), name] if prefix else [name])
        dotted = f"{prefix}.{name}" if prefix else name
        keys += leaf_keys(inner, dotted) if inner else [dotted]
    return keys


def _nearest(path: list[str]) -> str:
    """A hint: the nearest name in the same section, else the nearest leaf anywhere with the same or a like last name."""
    section = _section(path[:-1])
    names = list(section.model_fields) if section else []
    near = difflib.get_close_matches(path[-1], names, 1, cutoff=0.6)
    if near:
        return f"; did you mean {'.'.join([*path[:-1], near[0]])}?"
    leaves = leaf_keys()
    last = {k.rsplit(".", 1)[-1]: k for k in reversed(leaves)}
    near = difflib.get_close_matches(path[-1], list(last), 1, cutoff=0.75)
    if near:
        return f"; did you mean {last[near[0]]}?"
    return f"; known here: {', '.join(names)}" if names else ""
