"""Every key of a recipe, from the code: writes docs/recipe.md with `python -m tests.recipe_keys --write`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from beam_rl.recipe.tree import Recipe, Section

PAGE = Path(__file__).parents[1] / "docs" / "recipe.md"
HEAD = """# Every key of a recipe

Written by `python -m tests.recipe_keys --write`. A key that a recipe leaves out has its default; on the command line
`beam-rl train RECIPE key=value` changes one. `beam-rl train RECIPE --dry-run` shows what a recipe resolves to.
"""


def plain(kind: Any) -> str:
    """A type as a person would write it."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return plain(parts[0])
    if origin in (Union, UnionType):
        return " or ".join(plain(part) for part in parts if part is not NoneType)
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in parts)
    if origin in (list, tuple):
        return f"list of {plain(parts[0])}"
    if origin is dict or kind is dict:
        return "mapping"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(kind.__name__, "any")


def section_of(kind: Any) -> type[Section] | None:
    """The section that a field holds, if it is one, perhaps an optional one."""
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def rows(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, description) of every leaf, in the order of the code."""
    for name, field in section.model_fields.items():
        key, inner = prefix + name, section_of(field.annotation)
        if inner is not None:
            if field.default is None:
                about = inner.__doc__ if inner.__doc__ and inner.__doc__ != Section.__doc__ else ""
                yield key, "section", "absent", " ".join(about.split())
            yield from rows(inner, key + ".")
            continue
        default = "**needed**" if field.default is PydanticUndefined else shown(field.default)
        yield key, plain(field.annotation), default, (field.description or "").replace("|", "\\|")


def shown(value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def page() -> str:
    lines, last = [HEAD], ""
    for key, kind, default, about in rows(Recipe):
        top = key.partition(".")[0] if "." in key else ""
        if top != last or not lines[1:]:
            lines.append(f"\n## {top or 'The run'}\n| key | type | default | |\n| --- | --- | --- | --- |")
            last = top
        lines.append(f"| `{key}` | {kind} | {default} | {about} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page())
    else:
        print(page())
