"""What the trainer needs to know of a kind of model: Beam, or another one that Megatron-Bridge knows.

Everything else of a trainer is the same for all of them.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.layout import Place
from beam_rl.model_config import is_beam
from beam_rl.mxfp8.scheme import Scheme


class Family(Protocol):
    """A checkpoint in HF format, and the model that it is of as Megatron has it."""

    folder: Path
    config: Any  # transformers'

    @property
    def softcap(self) -> float | None:
        """c where logits are c·tanh(z/c); None: they are z."""

    def megatron_config(
        self, dtype: torch.dtype, device: torch.device, place: Place, scheme: Scheme | None, **layout: Any
    ) -> Any:
        """Megatron's configuration, with a `device`. dtype: of all weights but Beam's routers; layout: Megatron's names."""

    def build(self, config: Any, place: Place) -> list[Any]:
        """This rank's part of the model, weights not initialized: one chunk, or one for each virtual pipeline stage."""

    def load_into(self, chunks: Sequence[Any]) -> None:
        """Fills chunks, which have no adapter, from the checkpoint; all ranks call it."""

    def tensors_of(self, chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors under the checkpoint's names; all ranks call it and get them all, one after the other."""


def open_family(path: str) -> Family:
    """The checkpoint in a folder. InputError, in one line, if there is none that can be trained."""
    try:
        config = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        raise InputError(f"model.path = {path}: no folder with a readable config.json") from None
    if is_beam(config):
        from beam_rl.megatron.bridge import BeamCheckpoint

        return BeamCheckpoint(path)
    from beam_rl.megatron.bridged import BridgedCheckpoint

    return BridgedCheckpoint(path)


def base_tensors(bridge: Any, chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """What `Family.tensors_of` gives, by Bridge's AutoBridge; an adapter on the model is no part of them."""
    export = bridge.export_hf_weights(list(chunks), cpu=False, show_progress=False, merge_adapter_weights=False)
    for name, tensor in export:
        yield name.replace(".base_layer.", "."), tensor  # Bridge's name for a weight that has an adapter


def head_of(chunk: Any) -> Tensor:
    """(vocabulary, hidden) the head's weight of the last stage, which is the embedding's where they are tied."""
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    return chunk.output_layer.weight
