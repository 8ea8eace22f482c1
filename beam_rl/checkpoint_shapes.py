"""Every tensor of a Beam checkpoint as it lies on disk: name, shape, and whether it is FP32 in every precision.

`checkpoint_shapes` is a pure function of config.json; `tests/test_plan_layouts.py` compares it with transformers' model,
and what each rank holds with it.
"""

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]
LAYER = re.compile(r"model\.layers\.(\d+)\.")


def checkpoint_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """By the tensors' names on disk, in the model's order."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i, kind in enumerate(config["mlp_layer_types"]):
        layer = f"model.layers.{i}."
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}{norm}_layernorm.weight"] = (hidden,)
        shapes |= {f"{layer}self_attn.{name}": shape for name, shape in _attention(config)}
        shapes |= {f"{layer}mlp.{name}": shape for name, shape in _feed_forward(config, kind)}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def stored_names(folder: Path, config: Mapping[str, Any]) -> set[str]:
    """The names of another model's tensors, as they lie in its folder."""
    return {*stored_shapes(folder, config)}


def stored_shapes(folder: Path, config: Mapping[str, Any]) -> dict[str, Shape]:
    """By the names of the tensors in a checkpoint's folder.

    Without what is there twice, and without layers beyond the last, which only draft tokens. Read from the files' headers:
    the family's own code alone could say them without.
    """
    shapes: dict[str, Shape] = {}
    for file in weight_files(folder):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        shapes |= {name: tuple(about["shape"]) for name, about in header.items() if name != "__metadata__"}
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    beyond = config["num_hidden_layers"]
    return {name: s for name, s in shapes.items() if not ((found := LAYER.match(name)) and int(found[1]) >= beyond)}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, without others beside them that hold the same weights in another form.

    Mistral's folders have such a `consolidated.safetensors`. vLLM goes by the index too.
    """
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return [
            folder / name for name in sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        ]
    return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))


def is_fp32(name: str) -> bool:
    """The router and its correction bias."""
    return ".mlp.gate." in name


def _attention(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, dim, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    wide, narrow = heads * dim, config["num_key_value_heads"] * dim
    for part, outputs in (("q", wide), ("k", narrow), ("v", narrow), ("gate", wide)):
        yield f"{part}_proj.weight", (outputs, hidden)
    yield "o_proj.weight", (hidden, wide)
    yield "gate_bias", (heads,)
    yield from ((f"{part}_norm.weight", (dim,)) for part in ("q", "k"))


def _feed_forward(config: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Shape]]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    if kind == "dense":
        yield from _gated("", config["intermediate_size"], hidden)
        return
    yield "gate.weight", (experts, hidden)
    yield "gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _gated(f"experts.{expert}.", config["moe_intermediate_size"], hidden)


def _gated(prefix: str, width: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield from ((f"{prefix}{part}_proj.weight", (width, hidden)) for part in ("gate", "up"))
    yield f"{prefix}down_proj.weight", (hidden, width)
