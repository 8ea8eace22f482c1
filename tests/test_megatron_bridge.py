"""A HF checkpoint goes into Megatron and comes out bit for bit, and anything else is refused in one line."""

import json
import shutil
from pathlib import Path

import megatron_tiny as tiny
import pytest
import torch
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.beam import BeamForCausalLM

from beam_rl.megatron.bridge import merge_qkvg, split_qkvg
from beam_rl.megatron.export import export_checkpoint


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def on_disk(precision: str) -> dict[str, Tensor]:
    return load_file(tiny.checkpoint(precision) / "model.safetensors")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_come_out_as_they_went_in(precision: str) -> None:
    disk = on_disk(precision)
    assert {t.dtype for n, t in disk.items() if "mlp.gate." in n} == {torch.float32}  # router and correction bias
    same_bits(dict(tiny.trainer(precision=precision).hf_tensors()), disk)


def test_export_is_a_checkpoint_that_transformers_loads(tmp_path: Path) -> None:
    trainer = tiny.trainer(precision="bf16")
    trainer.update([tiny.micro_batch([20])], tiny.squared_objective, lr=1e-2)
    trainer.export(tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    same_bits(weights, dict(trainer.hf_tensors()))
    changed = [name for name, tensor in on_disk("bf16").items() if not torch.equal(tensor, weights[name])]
    assert len(changed) > 0.9 * len(weights)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = BeamForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    gate = "model.layers.4.mlp.gate.weight"
    assert torch.equal(loaded.state_dict()[gate], weights[gate])
    with pytest.raises(ValueError, match="out exists already"):
        trainer.export(tmp_path / "out")


def test_a_large_export_is_split_into_numbered_files_with_an_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(5)}
    export_checkpoint(tensors.items(), tiny.checkpoint(), tmp_path / "out", torch.float32, file_bytes=800)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name, tensor in tensors.items():
        with safe_open(tmp_path / "out" / index["weight_map"][name], "pt") as file:
            assert torch.equal(file.get_tensor(name), tensor)
    assert not list(tmp_path.glob("*.partial"))


def test_fused_projections_keep_each_head_in_its_group() -> None:
    heads, groups, dim, hidden = 6, 2, 4, 3
    parts = {
        name: torch.randn(n * dim, hidden) for name, n in {"q": heads, "gate": heads, "k": groups, "v": groups}.items()
    }
    merged = merge_qkvg(parts, groups)
    second_group = merged[len(merged) // 2 :]
    assert torch.equal(second_group[:dim], parts["q"][3 * dim : 4 * dim])
    assert torch.equal(second_group[3 * dim : 4 * dim], parts["gate"][3 * dim : 4 * dim])
    assert torch.equal(second_group[-dim:], parts["v"][dim:])
    back = split_qkvg(merged, heads, groups, dim)
    assert all(torch.equal(back[name], parts[name]) for name in parts)


def test_bridge_builds_and_loads_beam_like_any_model_it_knows() -> None:
    trainer = tiny.trainer()
    bridge = AutoBridge.from_hf_pretrained(tiny.checkpoint())
    model = bridge.to_megatron_provider(load_weights=False).provide()
    bridge.load_hf_weights([model])
    same_bits(dict(model.named_parameters()), dict(trainer.model.named_parameters()))
    same_bits(dict(model.named_buffers()), dict(trainer.model.named_buffers()))


def test_a_checkpoint_of_a_model_that_nobody_builds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    with pytest.raises(ValueError, match=rf"^model.path = {tmp_path}: Megatron-Bridge does not build GPT2LMHeadModel"):
        tiny.Trainer(str(tmp_path), tiny.settings(), 0, 1, "127.0.0.1:1")
    with pytest.raises(ValueError, match="no folder with a readable config.json"):
        tiny.Trainer(str(tmp_path / "nowhere"), tiny.settings(), 0, 1, "127.0.0.1:1")


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        ("model.layers.4.mlp.experts.3.up_proj.weight", None, r"lacks model.layers.4.mlp.experts.3.up_proj.weight"),
        (None, "model.layers.7.mlp.gate.weight", r"has the unknown model.layers.7.mlp.gate.weight"),
    ],
)
def test_a_checkpoint_with_other_tensors_is_refused(
    tmp_path: Path, drop: str | None, add: str | None, message: str
) -> None:
    shutil.copy(tiny.checkpoint() / "config.json", tmp_path)
    tensors = on_disk("fp32")
    if drop is not None:
        del tensors[drop]
    if add is not None:
        tensors[add] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message + r" \(1 such tensors\)"):
        tiny.Trainer(str(tmp_path), tiny.settings(), 0, 1, "127.0.0.1:1")
