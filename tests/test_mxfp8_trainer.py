"""MXFP8 in the trainer: its products, which weights have them, and that all else works as in BF16."""

import shutil
from pathlib import Path
from typing import Any

import lora_tiny
import megatron_layouts as layouts
import megatron_tiny as tiny
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import transformer_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.layout import pad, token_block
from beam_rl.megatron import mxfp8
from beam_rl.megatron import trainer as trainer_module
from beam_rl.megatron.bridge import QKVG, merge_qkvg
from beam_rl.megatron.lora_layers import AdaptedLinear
from beam_rl.megatron.model import config_from_hf, layout_fields
from beam_rl.megatron.trainer import Trainer
from beam_rl.mxfp8.format import dequantize, quantize, rounded
from beam_rl.mxfp8.scheme import Scheme, scheme_of
from beam_rl.recipe.tree import Mxfp8, Nvme, Optimizer, Parallel

LR = 1e-3
BATCH = tiny.micro_batch([12, 30, 5])
EMULATED = (mxfp8.Mxfp8ColumnParallelLinear, mxfp8.Mxfp8RowParallelLinear)


def trained(updates: int = 3, **changes: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some updates on one batch, and the weights after them."""
    trainer = tiny.trainer(precision="mxfp8", **changes)
    losses = [trainer.update([BATCH], tiny.squared_objective, LR)["loss/policy"] for _ in range(updates)]
    return losses, {name: tensor.clone() for name, tensor in trainer.sync_tensors()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- one product ------------------------------------------------------------------------------------------


def operands(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, 1, inputs), (outputs, inputs), (tokens, 1, outputs))
    x, weight, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x.requires_grad_(), weight.requires_grad_(), grad


def in_blocks_of_rows(matrix: Tensor) -> Tensor:
    """Quantized along the first dimension: transposed, with zeros behind."""
    filled = F.pad(matrix.t(), (0, -len(matrix) % 32)).contiguous()
    return dequantize(quantize(filled), matrix.dtype).t()[: len(matrix)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [64, 45, 1, 0])
def test_all_three_products_have_operands_quantized_along_what_they_sum_over(tokens: int, dtype: torch.dtype) -> None:
    x, weight, grad = operands(tokens, 96, 80, dtype)
    out = mxfp8.Product.apply(x, weight)
    out.backward(grad)
    rows, sums = x.detach().view(tokens, 96), grad.view(tokens, 80)
    want = dequantize(quantize(rows), dtype) @ dequantize(quantize(weight.detach()), dtype).t()
    want_x = in_blocks_of_rows(sums.t()).t() @ in_blocks_of_rows(weight.detach())
    want_weight = in_blocks_of_rows(sums).t() @ in_blocks_of_rows(rows)
    assert x.grad is not None and weight.grad is not None
    for ours, theirs in ((out, want), (x.grad, want_x), (weight.grad, want_weight)):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.view(theirs.shape), theirs)


def test_a_product_is_off_by_what_e4m3s_three_bits_explain() -> None:
    """An element is off by 2.4 % of itself, rms: evenly in a step of 2^-3 of its power of two. Two operands are."""
    x, weight, grad = operands(256, 256, 256, torch.float32)
    mxfp8.Product.apply(x, weight).backward(grad)
    exact = {"x": (grad.view(256, 256) @ weight).view(x.shape), "weight": grad.view(256, 256).t() @ x.view(256, 256)}
    found = {"out": (mxfp8.Product.apply(x, weight), x @ weight.t())}
    found |= {"x": (x.grad, exact["x"]), "weight": (weight.grad, exact["weight"])}
    for name, (ours, theirs) in found.items():
        error = float(((ours - theirs).norm() / theirs.norm()).detach())
        assert 0.025 < error < 0.045, (name, error)


def test_a_frozen_weight_has_no_gradient_and_keeps_no_input() -> None:
    x, weight, grad = operands(64, 96, 64, torch.bfloat16)
    weight.requires_grad_(False)
    out = mxfp8.Product.apply(x, weight)
    assert out.grad_fn.saved_tensors[0] is None
    out.backward(grad)
    assert x.grad is not None and weight.grad is None


# --- which layers -----------------------------------------------------------------------------------------


def emulated(trainer: Trainer) -> set[str]:
    """Names of the MXFP8 linear layers, every other linear layer being plain."""
    found = {name for name, module in trainer.model.named_modules() if isinstance(module, EMULATED)}
    linear = {name for name, module in trainer.model.named_modules() if ".linear_" in name}
    assert found <= linear
    return found


def test_projections_multiply_in_mxfp8_and_router_norms_embedding_and_head_do_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = tiny.trainer(precision="mxfp8")
    assert "trainer.precision = mxfp8: emulated" in capsys.readouterr().out
    everywhere = {name for name, _ in trainer.model.named_modules() if ".linear_" in name}
    assert emulated(trainer) == everywhere and len(everywhere) == 7 * 2 + 3 * 2 + 4 * 2 * tiny.EXPERTS
    assert type(trainer.model.output_layer) is ColumnParallelLinear
    assert trainer.model.decoder.layers[3].mlp.router.weight.dtype == torch.float32
    bf16 = tiny.trainer(precision="bf16")
    assert same(dict(trainer.hf_tensors()), dict(bf16.hf_tensors()))  # parameters stay what they are


def test_whole_layers_at_either_end_stay_bf16() -> None:
    trainer = tiny.trainer(precision="mxfp8", mxfp8=Mxfp8(keep_first_layers=4, keep_last_layers=1))
    assert {int(name.split(".")[2]) for name in emulated(trainer)} == {4, 5}
    assert trainer.scheme is not None and trainer.scheme.has_layer(4) and not trainer.scheme.has_layer(6)


def test_what_mxfp8_cannot_cut_is_one_line() -> None:
    with pytest.raises(
        InputError, match=r"^trainer.precision = mxfp8: mxfp8.keep_first_layers \+ keep_last_layers = 7:"
    ):
        tiny.trainer(precision="mxfp8", mxfp8=Mxfp8(keep_first_layers=7))


# --- training ---------------------------------------------------------------------------------------------


def test_mxfp8_trains_like_bf16_and_the_same_each_time() -> None:
    losses, weights = trained()
    again, weights_again = trained()
    assert losses == again and same(weights, weights_again)
    assert losses[2] < losses[1] < losses[0]
    bf16 = tiny.trainer(precision="bf16")
    theirs = [bf16.update([BATCH], tiny.squared_objective, LR)["loss/policy"] for _ in range(3)]
    assert losses != theirs and np.allclose(losses, theirs, rtol=0.1)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit(recompute: str) -> None:
    plain, recomputed = trained(2), trained(2, recompute=recompute)
    assert plain[0] == recomputed[0] and same(plain[1], recomputed[1])


def test_adam_on_nvme_makes_the_same_weights(tmp_path: Path) -> None:
    def optimizer(**changes: Any) -> Optimizer:
        return Optimizer(lr=LR, weight_decay=0.1, **changes)

    nvme = Nvme(path=str(tmp_path), block_bytes=65536)
    losses, weights = trained(2, optimizer=optimizer())
    streamed, weights_streamed = trained(
        2, optimizer=optimizer(offload="nvme", nvme=nvme), nvme_folder=str(tmp_path / "state")
    )
    assert losses == streamed and same(weights, weights_streamed)


def test_an_adapter_is_bf16_on_a_frozen_mxfp8_base() -> None:
    trainer = tiny.trainer(precision="mxfp8", adapter=lora_tiny.adapter())
    adapted = [module for module in trainer.model.modules() if isinstance(module, AdaptedLinear)]
    assert all(isinstance(module.to_wrap, EMULATED) for module in adapted) and len(adapted) == len(emulated(trainer))
    assert not any(isinstance(part, EMULATED) for module in adapted for part in module.adapter.modules())
    base = {name: tensor.clone() for name, tensor in trainer.hf_tensors()}
    start = {name: tensor.clone() for name, tensor in trainer.sync_tensors()}
    (score,) = trainer.score([BATCH])
    (alone,) = tiny.trainer(precision="mxfp8").score([BATCH])
    assert np.array_equal(score.logp, alone.logp)  # a new adapter adds nothing
    losses = [trainer.update([BATCH], tiny.squared_objective, LR)["loss/policy"] for _ in range(3)]
    assert losses[2] < losses[0] and same(base, dict(trainer.hf_tensors()))
    after = dict(trainer.sync_tensors())
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    moved = {name for name in start if not torch.equal(start[name], after[name])}
    assert {name for name in start if "lora_B" in name} <= moved


# --- several ranks ----------------------------------------------------------------------------------------


def seen(rank: int, parallel: Parallel, master: str) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Log-probabilities and gradients, with FP32 around the products, so that only the products round."""
    trainer_module.DTYPES["mxfp8"] = torch.float32
    settings = tiny.settings(precision="mxfp8", parallel=parallel, optimizer=Optimizer(lr=LR, clip_grad=1e9))
    trainer = Trainer(str(tiny.checkpoint()), settings, rank, parallel.ranks, master)
    batches = [tiny.micro_batch(lengths, seed=i) for i, lengths in enumerate([[13, 31], [7, 5, 12]])]  # need no padding
    batches = [layouts.cut_routes(batch, trainer.place) for batch in batches]
    scores = trainer.score(batches)
    trainer.update(batches, tiny.squared_objective, LR)
    check_shards(trainer)
    return [score.logp for score in scores], layouts.gradients(trainer)


@torch.no_grad()
def check_shards(trainer: Trainer) -> None:
    """The bits that an engine gets of a weight are those that this rank multiplies its part of it with."""
    assert trainer.scheme is not None
    sent = dict(trainer.scheme.quantized(trainer.hf_tensors()))
    tp, place, layers = trainer.settings.parallel.tp, trainer.place, trainer.model.decoder.layers

    def part(name: str, dim: int) -> Tensor:
        return sent[name].view(torch.uint8).chunk(tp, dim)[place.tp]

    for kind in ("", "_scale"):
        whole = {name: sent[f"model.layers.0.self_attn.{name}_proj.weight{kind}"].view(torch.uint8) for name in QKVG}
        merged = merge_qkvg(whole, trainer.hf["num_key_value_heads"]).chunk(tp)[place.tp]
        mlp = f"model.layers.0.mlp.{{}}_proj.weight{kind}"
        first = parallel_state.get_expert_model_parallel_rank() * len(layers[3].mlp.experts.local_experts)
        expert = f"model.layers.3.mlp.experts.{first}.down_proj.weight{kind}"
        for linear, want in (
            (layers[0].self_attention.linear_qkv, merged),
            (layers[0].self_attention.linear_proj, part(f"model.layers.0.self_attn.o_proj.weight{kind}", 1)),
            (layers[0].mlp.linear_fc1, torch.cat([part(mlp.format("gate"), 0), part(mlp.format("up"), 0)])),
            (layers[0].mlp.linear_fc2, part(mlp.format("down"), 1)),
            (layers[3].mlp.experts.local_experts[0].linear_fc2, sent[expert].view(torch.uint8)),
        ):
            held = quantize(linear.weight.bfloat16())
            assert torch.equal((held.scales if kind else held.payload).view(torch.uint8), want)


def test_two_ranks_compute_what_one_does() -> None:
    """Tensor, sequence and expert parallelism. Sums in another order differ by FP32's rounding, until that tips an operand
    of the backward pass over to the next E4M3 value, which tips over others below: seen in none of the last layer's."""
    ((logp, gradients),) = tiny.in_new_processes(seen, (0, Parallel(), tiny.meeting_point()))
    parallel, master = Parallel(tp=2, sp=True, ep=2), tiny.meeting_point()
    for logp_too, gradients_too in tiny.in_new_processes(seen, *[(rank, parallel, master) for rank in range(2)]):
        assert max(layouts.error(a, b) for a, b in zip(logp_too, logp, strict=True)) < 1e-6
        assert gradients.keys() == gradients_too.keys()
        errors = {name: layouts.error(gradients_too[name], gradients[name]) for name in gradients}
        assert max(error for name, error in errors.items() if "layers.6." in name) < 1e-5
        assert max(errors.values()) < 0.05, max(errors.items(), key=lambda item: item[1])


# --- Transformer Engine's own -----------------------------------------------------------------------------


def test_transformer_engine_is_told_of_mxfp8_where_the_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = tiny.reference_model("bf16").config
    scheme = scheme_of(hf, keep_first_layers=2)
    here = config_from_hf(hf, torch.bfloat16, torch.device("cpu"), scheme)
    assert here.fp8 is None and here.mxfp8 == scheme
    monkeypatch.setattr(mxfp8, "is_native", lambda scheme: True)
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda version: True)
    layout = layout_fields(Parallel(), 7, "selective")
    config = config_from_hf(hf, torch.bfloat16, torch.device("cpu"), scheme, **layout)
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == ("e4m3", "mxfp8", False)
    plain = [layer for layer in range(7) if is_first_last_bf16_layer(config, layer)]
    assert plain == [layer for layer in range(7) if not scheme.has_layer(layer)] == [0, 1]


def test_weights_alone_are_rounded_where_the_recipe_says_so() -> None:
    """As vLLM's kernels for Hopper multiply: activations and gradients stay what they are."""
    trainer = tiny.trainer(precision="mxfp8", mxfp8=Mxfp8(activations=False))
    layer = trainer.model.decoder.layers[0].mlp.linear_fc1
    x = torch.randn(9, 1, 64).bfloat16().requires_grad_()
    y, _ = layer(x)
    y.sum().backward()
    weight, ones = rounded(layer.weight.detach()), torch.ones_like(y)
    assert torch.equal(y, x @ weight.t()) and torch.equal(x.grad, ones @ weight)
    assert torch.equal(mxfp8.WeightProduct.apply(x, layer.weight), y)
    assert not torch.equal(y, mxfp8.Product.apply(x, layer.weight))
    losses, _ = trained(mxfp8=Mxfp8(activations=False))
    assert losses[2] < losses[0]


def test_rounded_weights_score_as_bf16_of_the_same_values_does(tmp_path: Path) -> None:
    """Two kinds of experts on a GPU: the emulation's one after the other, Transformer Engine's all together."""
    scheme = scheme_of(tiny.reference_model("bf16").config, activations=False)
    folder = shutil.copytree(tiny.checkpoint("bf16"), tmp_path / "rounded")
    tensors = load_file(folder / "model.safetensors")
    held = {name: rounded(weight) if scheme.has(name) else weight for name, weight in tensors.items()}
    assert sum(not torch.equal(held[name], tensors[name]) for name in held) > 7 * 5
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    logp = []
    for changes in ({"precision": "bf16"}, {"precision": "mxfp8", "mxfp8": Mxfp8(activations=False)}):
        (score,) = Trainer(str(folder), tiny.settings(**changes), 0, 1, tiny.meeting_point()).score([BATCH])
        logp.append(score.logp)
    assert np.abs(logp[0] - logp[1]).mean() < (0.01 if torch.cuda.is_available() else 1e-6)


@pytest.mark.gpu
def test_transformer_engine_computes_what_the_emulation_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test to run on a GPU that multiplies MXFP8: log-probabilities, gradient norms, recomputation."""
    if not mxfp8.is_native(Scheme(7)):
        pytest.skip("needs a GPU of compute capability 10 and Transformer Engine")
    batch = pad(BATCH, Parallel(), tiny.EXPERTS, token_block("mxfp8"))

    def seen(**changes: Any) -> tuple[np.ndarray, float]:
        trainer = tiny.trainer(precision="mxfp8", **changes)
        (score,) = trainer.score([batch])
        return score.logp, trainer.update([batch], tiny.squared_objective, LR)["optim/grad_norm"]

    logp, norm = seen()
    assert np.isclose(seen(recompute="selective")[1], norm, rtol=1e-3)
    monkeypatch.setattr(mxfp8, "is_native", lambda scheme: False)
    emulated_logp, emulated_norm = seen()
    assert np.abs(logp - emulated_logp).mean() < 0.02 and np.isclose(norm, emulated_norm, rtol=0.05)
