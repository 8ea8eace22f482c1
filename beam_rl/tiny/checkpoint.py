"""A small Beam: its shape, its first weights, its tokenizer, and how it is laid down as a Hugging Face folder.

Promises the published checkpoint's tensor names on disk (one tensor per expert) and an FP32 router in every dtype.
Knows nothing about a task beyond its tokens, and nothing about training.
"""

import math
from pathlib import Path
from typing import Literal

import torch
from safetensors import torch as safetensors_torch
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    BeamConfig,
    BeamForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from beam_rl.tiny.sizes import TINY, Size

Dtype = Literal["fp32", "bf16"]
TORCH_DTYPE: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUTER = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %} = {{ message['content'] }} {{ eos_token }}"
    "{% else %} {{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %} ={% endif %}"
)


def tiny_config(size: Size = TINY) -> BeamConfig:
    """The configuration of a small Beam."""
    index = size.task.TOKENS.index
    return BeamConfig(
        architectures=["BeamForCausalLM"],
        vocab_size=size.vocabulary,
        **size.shape,
        bos_token_id=index(size.task.BOS),
        eos_token_id=index(size.task.EOS),
        pad_token_id=index(size.task.PAD),
    )


def fresh_model(seed: int, size: Size = TINY, device: str = "cpu") -> BeamForCausalLM:
    """An untrained model: embeddings N(0, 1), matrices N(0, 1/fan-in), norms 1, biases 0; the router is FP32."""
    config = tiny_config(size)
    config._attn_implementation = "sdpa"
    config._experts_implementation = size.experts
    own_generator = [torch.device(device)] if device != "cpu" else []
    with torch.random.fork_rng(devices=own_generator), torch.device(device):
        model = BeamForCausalLM(config).float()  # transformers' own initialisation draws from the global generators
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") or name.endswith("gate_bias"):
                continue
            std = 1.0 if "embed_tokens" in name else 1 / math.sqrt(parameter.shape[-1])
            parameter.normal_(0, std, generator=generator)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not name.endswith(ROUTER) and "inv_freq" not in name:
            tensor.data = tensor.data.to(TORCH_DTYPE[size.trained_in])
    return model


def tiny_tokenizer(size: Size = TINY) -> PreTrainedTokenizerFast:
    """One token a word, words split at white space; encoding a text puts <bos> in front, as real tokenizers do."""
    task = size.task
    words = words_of(size)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=task.UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{task.BOS} $A", special_tokens=[(task.BOS, words.index(task.BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=task.BOS,
        eos_token=task.EOS,
        pad_token=task.PAD,
        unk_token=task.UNK,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def words_of(size: Size) -> list[str]:
    """The whole vocabulary: the task's tokens, and names for those left over."""
    return size.task.TOKENS + [f"<unused{i}>" for i in range(len(size.task.TOKENS), size.vocabulary)]


def disk_tensors(model: BeamForCausalLM, dtype: Dtype) -> dict[str, Tensor]:
    """The weights under the published checkpoint's names; transformers holds a layer's experts fused.

    Fused `gate_up_proj` (experts, 2 · inner, hidden) has each expert's gate rows first, then its up rows; `down_proj`
    is (experts, hidden, inner).
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        layer, fused, projection = name.partition(".mlp.experts.")
        if not fused:
            tensors[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            if projection == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            else:
                parts = {projection: matrix}
            tensors |= {f"{layer}{fused}{expert}.{part}.weight": weight for part, weight in parts.items()}
    return {
        name: tensor.to("cpu", torch.float32 if name.endswith(ROUTER) else TORCH_DTYPE[dtype]).contiguous().clone()
        for name, tensor in tensors.items()
    }


def save_hf(model: BeamForCausalLM, folder: Path, dtype: Dtype, size: Size = TINY) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files into `folder`."""
    config = tiny_config(size)
    config.dtype = TORCH_DTYPE[dtype]
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
    weights = safetensors_torch.save(disk_tensors(model, dtype), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)  # not save_file, which hides the file from other users
    tiny_tokenizer(size).save_pretrained(folder)
