"""LoRA in the trainer: the same adapter from every layout, at our ranks and scales, and nothing else is trained."""

import dataclasses
from pathlib import Path
from typing import Any

import lora_tiny
import megatron_layouts as layouts
import megatron_tiny as tiny
import numpy as np
import pytest
import torch
from layout_table import BOUND, ONE, rows
from megatron.core import parallel_state
from torch import Tensor

from beam_rl.errors import InputError
from beam_rl.layout import check_layout
from beam_rl.lora import ATTENTION_OUTPUT, EXPERTS, adapter_tensors, repeated_tensors
from beam_rl.megatron.checkpoint import _leaves
from beam_rl.megatron.lora_layers import AdaptedLinear
from beam_rl.recipe.tree import Parallel

LR = 1e-3
BATCH = tiny.micro_batch([12, 30, 5])
WITH_ADAPTER = [
    layouts.Layout("DP2, selective recompute", Parallel(dp=2), "selective"),
    layouts.Layout("TP2+SP, EP2", Parallel(tp=2, sp=True, ep=2)),
    layouts.Layout("DP2, EP2", Parallel(dp=2, ep=2)),
    layouts.Layout("DP2, ETP2", Parallel(dp=2, etp=2)),
    layouts.Layout("PP2, full recompute", Parallel(pp=2), "full"),
]


def compare(chosen: list[layouts.Layout], targets: tuple[str, ...], folder: Path) -> None:
    shape = lora_tiny.adapter(*targets)
    given = {"adapter": shape, "adapter_folder": str(lora_tiny.folder(folder / "start", shape))}
    chosen = [dataclasses.replace(layout, **given) for layout in chosen]
    for layout, errors, bits in rows(chosen, folder, dataclasses.replace(ONE, **given)):
        wrong = {name: value for name, value in errors.items() if not value <= BOUND}
        wrong |= {name: same for name, same in bits.items() if not same}
        assert not wrong, f"{layout.name}: {wrong}"


def test_layouts_train_the_adapter_of_one_process(tmp_path: Path) -> None:
    """Scores, gradients, two updates of a given adapter; its base, export, resume and checkpoints to the bit."""
    compare(WITH_ADAPTER, (), tmp_path)


def test_a_pipeline_stage_may_have_no_adapter(tmp_path: Path) -> None:
    stages = layouts.Layout("PP2, the first without experts", Parallel(pp=2, pp_layers=[3, 4]), "selective")
    compare([stages], EXPERTS, tmp_path)


def test_recomputation_reaches_an_adapter_below_which_nothing_is_trained() -> None:
    """The first experts' input has no gradient of its own."""
    found = []
    for recompute in ("none", "selective", "full"):
        trainer = tiny.trainer(adapter=lora_tiny.adapter(*EXPERTS), recompute=recompute)
        trainer.update([BATCH], tiny.squared_objective, LR)
        found.append(dict(trainer.sync_tensors()))
    first = [tensor for name, tensor in found[0].items() if ".3.mlp" in name and "lora_B" in name]
    assert first and all(tensor.any() for tensor in first)
    assert all(torch.equal(other[name], tensor) for other in found[1:] for name, tensor in found[0].items())


# --- what is trained, and what it adds --------------------------------------------------------------------


def test_a_new_adapter_adds_nothing_and_its_a_is_of_the_seed_and_the_module() -> None:
    trainer = tiny.trainer(adapter=lora_tiny.adapter())
    assert np.array_equal(trainer.score([BATCH])[0].logp, tiny.trainer().score([BATCH])[0].logp)
    found, again, other = (
        dict(tiny.trainer(adapter=lora_tiny.adapter(), seed=seed).sync_tensors()) for seed in (0, 0, 1)
    )
    assert not any(tensor.any() for name, tensor in found.items() if "lora_B" in name)
    first = {name: tensor for name, tensor in found.items() if "lora_A" in name}
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]) and not torch.equal(tensor, other[name])
        assert tensor.square().mean() * tensor.shape[1] == pytest.approx(1, abs=0.5)
    assert len({float(tensor[0, 0]) for tensor in first.values()}) == len(first)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_base_has_no_gradient_buffer_no_master_and_no_moments(precision: str) -> None:
    shape = lora_tiny.adapter()
    trainer = tiny.trainer(adapter=shape, precision=precision)
    before = {name: tensor.clone() for name, tensor in trainer.hf_tensors()}
    trainer.update([BATCH], tiny.squared_objective, LR)
    sizes = {name: size[0] * size[1] for name, size in adapter_tensors(shape, tiny.config()).items()}
    own = sum(size for name, size in sizes.items() if name not in repeated_tensors(shape, tiny.config()))
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad == hasattr(parameter, "main_grad") == (".adapter." in name)
        assert parameter.grad is None
        if not parameter.requires_grad:
            assert not hasattr(parameter, "main_param")
        else:
            assert parameter.dtype == tiny.DTYPES[precision]
    (ddp,) = trainer.ddp
    buffers = [buffer.grad_data.numel() for buffer in ddp.buffers + ddp.expert_parallel_buffers]
    assert own <= sum(buffers) < 1.1 * own  # padded
    mains = [main for group in trainer.optimizer.param_groups for main in group["params"]]
    assert sum(main.numel() for main in mains) == own and all(main.dtype == torch.float32 for main in mains)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.hf_tensors())


def test_a_sync_is_the_adapter_with_its_names_and_no_tensor_twice() -> None:
    shape = lora_tiny.adapter()
    trainer = tiny.trainer(adapter=shape)
    sent = list(trainer.sync_tensors())
    due, repeated = adapter_tensors(shape, tiny.config()), repeated_tensors(shape, tiny.config())
    assert [(name, tuple(tensor.shape)) for name, tensor in sent] != [] and len(sent) == len(dict(sent))
    assert {name: tuple(t.shape) for name, t in sent} == {n: size for n, size in due.items() if n not in repeated}
    assert [name for name, _ in tiny.trainer().sync_tensors()] == [name for name, _ in tiny.trainer().hf_tensors()]


def linears(trainer: tiny.Trainer) -> dict[str, AdaptedLinear]:
    return {name: m for name, m in trainer.model.named_modules() if isinstance(m, AdaptedLinear)}


def test_the_scale_is_alpha_over_rank_for_experts_as_for_dense_modules() -> None:
    """Of what a module adds to its output, whatever the classes below note as their alpha and rank."""
    trainer = tiny.trainer(adapter=lora_tiny.adapter())
    found = linears(trainer)
    assert trainer.adapted
    trainer.adapted.load(lora_tiny.values(lora_tiny.adapter(), tiny.config()))
    for name in (
        "decoder.layers.0.self_attention.linear_proj",
        "decoder.layers.3.mlp.experts.local_experts.5.linear_fc2",
    ):
        module = found[name]
        x = torch.randn(3, 1, module.to_wrap.weight.shape[1])
        a, b = module.adapter.linear_in.weight, module.adapter.linear_out.weight
        added = module(x)[0] - module.to_wrap(x)[0]
        torch.testing.assert_close(added, lora_tiny.ALPHA / lora_tiny.RANK * x @ a.T @ b.T, rtol=0, atol=1e-5)
        assert b.shape[1] == (4 if "experts" in name else 16)


def test_bridge_alone_would_multiply_an_experts_scale_by_top_k() -> None:
    """Its `normalize_moe_lora` divides the rank and keeps alpha; ours keeps the scale. The day this fails, it does too."""
    from megatron.bridge.peft.lora import LoRA

    lora = LoRA(dim=16, alpha=32, normalize_moe_lora=True, share_expert_adapters=False)
    layer = tiny.trainer().model.decoder.layers[3]
    expert = lora.transform(layer.mlp.experts.local_experts[0].linear_fc2, "linear_fc2", "mlp.experts.local_experts.0")
    dense = lora.transform(layer.self_attention.linear_proj, "linear_proj", "self_attention")
    assert (dense.adapter.alpha / dense.adapter.dim, expert.adapter.alpha / expert.adapter.dim) == (2, 2 * tiny.TOP_K)


def _etp_scores(rank: int, master: str, folder: str, bridges_own: bool) -> Any:
    from megatron.bridge.peft.utils import ParallelLinearAdapter

    from beam_rl.megatron import lora_layers

    if bridges_own:
        own = lambda *args, **kwargs: ParallelLinearAdapter(*args, is_expert=True, **kwargs)  # noqa: E731
        lora_layers.ExpertAdapter = own  # type: ignore[assignment, misc]
    settings = tiny.settings(parallel=Parallel(dp=2, etp=2), adapter=lora_tiny.adapter(*EXPERTS), adapter_folder=folder)
    trainer = tiny.Trainer(str(tiny.checkpoint()), settings, rank, 2, master)
    logp = trainer.score([BATCH])[0].logp
    trainer.close()
    return logp


def test_bridges_own_adapter_is_wrong_for_an_expert_on_several_ranks(tmp_path: Path) -> None:
    """The day this fails, `lora_layers.ExpertAdapter` is no longer needed."""
    folder = str(lora_tiny.folder(tmp_path / "start", lora_tiny.adapter(*EXPERTS)))
    one = tiny.trainer(adapter=lora_tiny.adapter(*EXPERTS), adapter_folder=folder).score([BATCH])[0].logp
    for bridges_own, low, high in ((False, 0, 1e-5), (True, 0.1, np.inf)):
        master = tiny.meeting_point()
        for logp in tiny.in_new_processes(_etp_scores, *[(rank, master, folder, bridges_own) for rank in range(2)]):
            assert low <= np.abs(logp - one).max() <= high


def test_grouped_experts_add_what_single_experts_do() -> None:
    """On a GPU the experts of a layer are one module with one adapter: Bridge's, with a matrix for each expert."""
    from beam_rl.megatron.lora_layers import GroupedExpertAdapter

    trainer = tiny.trainer(adapter=lora_tiny.adapter(*EXPERTS))
    assert trainer.adapted
    trainer.adapted.load(lora_tiny.values(lora_tiny.adapter(*EXPERTS), tiny.config()))
    for linear in ("linear_fc1", "linear_fc2"):
        single = [getattr(expert, linear) for expert in trainer.model.decoder.layers[3].mlp.experts.local_experts]
        first = single[0].to_wrap
        grouped = GroupedExpertAdapter(
            first.weight.shape[1],
            first.weight.shape[0],
            4,
            num_local_experts=len(single),
            base_linear_name=f"mlp.experts.{linear}",
            activation="identity",
            input_is_parallel=linear == "linear_fc2",
            model_parallel_config=trainer.config,
            alpha=8.0,
        )
        with torch.no_grad():
            for i, module in enumerate(single):
                grouped.linear_in.weight[i] = module.adapter.linear_in.weight
                grouped.linear_out.weight[i] = module.adapter.linear_out.weight
        splits = [i % 3 for i in range(len(single))]
        x = torch.randn(sum(splits), first.weight.shape[1])
        due = [module.adapter(part) for module, part in zip(single, x.split(splits), strict=True)]
        torch.testing.assert_close(grouped(x, splits), torch.cat(due), rtol=0, atol=1e-6)
        check_shards(grouped, trainer, linear)


def check_shards(grouped: Any, trainer: tiny.Trainer, linear: str) -> None:
    """A checkpoint has the same tensors of grouped experts as of single ones, each without a gap in the parameter."""
    from megatron.core.dist_checkpointing.mapping import apply_factories
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors

    def found(state: dict[str, Any], prefix: str) -> dict[Any, Tensor]:
        apply_factories(state)
        tensors, _ = extract_sharded_tensors(state)
        shards = [shard for value in tensors.values() for shard in _leaves(value) if "adapter" in shard.key]
        return {(s.key.removeprefix(prefix), s.global_shape, s.global_offset, s.replica_id): s.data for s in shards}

    experts = trainer.model.decoder.layers[3].mlp.experts
    layout = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    single = experts.sharded_state_dict("x.", metadata=layout | {"singleton_local_shards": True})
    due = {k: v for k, v in found(single, "x.experts.").items() if linear in k[0]}
    ours = found(grouped.sharded_state_dict(f"{linear}.adapter."), "")
    assert ours.keys() == due.keys() and len(ours) == tiny.EXPERTS * (3 if linear == "linear_fc1" else 2)
    assert all(torch.equal(values, due[key]) and values.is_contiguous() for key, values in ours.items())


def test_the_reference_is_the_model_without_the_adapter() -> None:
    trainer = tiny.trainer(adapter=lora_tiny.adapter())
    base = trainer.score([BATCH])[0].logp
    trainer.update([BATCH], tiny.squared_objective, LR)
    after = trainer.score([BATCH])[0].logp
    assert np.array_equal(trainer.score_reference([BATCH])[0].logp, base)
    assert np.array_equal(trainer.score([BATCH])[0].logp, after) and np.abs(after - base).max() > 1e-3


@pytest.mark.parametrize(
    ("parallel", "targets", "problems"),
    [
        (Parallel(tp=32, sp=True), (), "must divide model.lora.rank = 16, to cut the adapter"),
        (Parallel(dp=8, etp=8), (), "must divide the experts' rank 4, of model.lora.rank, to cut the adapter"),
        (Parallel(tp=3, sp=True), ATTENTION_OUTPUT, "must divide the hidden size 64, to cut the adapter"),
        (Parallel(dp=8, etp=8), ATTENTION_OUTPUT, None),
    ],
)
def test_a_layout_that_cannot_cut_the_adapter_names_the_key(
    parallel: Parallel, targets: tuple[str, ...], problems: str | None
) -> None:
    found = check_layout(tiny.config(), parallel, lora_tiny.adapter(*targets))
    of_adapter = [problem for problem in found if "adapter" in problem]
    assert (len(of_adapter) == 1 and problems in of_adapter[0]) if problems else not of_adapter


# --- checkpoints ------------------------------------------------------------------------------------------


def test_a_resumed_bf16_run_goes_on_to_the_bit_and_its_checkpoint_holds_the_adapter_alone(tmp_path: Path) -> None:
    trainer = tiny.trainer(adapter=lora_tiny.adapter(), precision="bf16")
    trainer.update([BATCH], tiny.squared_objective, LR)
    trainer.save(tmp_path / "one")
    due = trainer.update([BATCH], tiny.squared_objective, LR), dict(trainer.sync_tensors())
    resumed = tiny.trainer(adapter=lora_tiny.adapter(), precision="bf16", seed=5)
    resumed.load(tmp_path / "one")
    assert resumed.update([BATCH], tiny.squared_objective, LR) == due[0]
    assert all(torch.equal(tensor, due[1][name]) for name, tensor in resumed.sync_tensors())
    names = layouts.read_checkpoint(tmp_path / "one").keys() - {"optimizer.step"}
    assert names and all(".adapter." in name for name in names)


def test_a_checkpoint_of_another_base_or_adapter_is_refused_in_one_line(tmp_path: Path) -> None:
    shape = lora_tiny.adapter(*ATTENTION_OUTPUT)
    trainer, full = tiny.trainer(adapter=shape), tiny.trainer()
    trainer.save(tmp_path / "adapter")
    full.save(tmp_path / "full")
    before = dict(trainer.sync_tensors())
    with pytest.raises(
        InputError, match="holds an adapter, but with this recipe's model.lora the trainer has all weights"
    ):
        full.load(tmp_path / "adapter")
    with pytest.raises(
        InputError, match="holds all weights, but with this recipe's model.lora the trainer has an adapter"
    ):
        trainer.load(tmp_path / "full")
    other = tiny.trainer(adapter=dataclasses.replace(shape, alpha=1.0))
    with pytest.raises(InputError, match="holds another adapter .* model.lora has changed since"):
        other.load(tmp_path / "adapter")
    changed = further_trained(tmp_path / "base")
    trainer.checkpoint.folder = changed
    with pytest.raises(InputError, match="holds an adapter of another base model: model.path has changed since"):
        trainer.load(tmp_path / "adapter")
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.sync_tensors())


def further_trained(folder: Path) -> Path:
    """The tiny checkpoint with other weights and the same names and shapes."""
    model = tiny.reference_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    model.save_pretrained(folder)
    return folder
