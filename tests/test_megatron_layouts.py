"""Every layout gives the same numbers; what can't be laid out is refused by name. The whole: `tests.layout_table`."""

import json
from pathlib import Path

import megatron_layouts as layouts
import megatron_tiny as tiny
import numpy as np
import pytest
import torch
from layout_table import BOUND, LAYOUTS, rows

from beam_rl.layout import (
    PADDING,
    Place,
    check_layout,
    context_rows,
    cut_routes,
    even_out,
    pad,
    padding_only,
    place_of,
    routed_rows,
    stage_layers,
)
from beam_rl.megatron.checkpoint import _boxes
from beam_rl.recipe.tree import Parallel
from beam_rl.samples import MicroBatch

KINDS = ["dense"] * 3 + ["sparse"] * tiny.MOE_LAYERS
IN_CI = {
    "DP2, distributed optimizer",
    "TP2+SP",
    "DP2, EP2",
    "DP2, ETP2",
    "PP2, full recompute",
    "PP2, 2 virtual stages, selective recompute",
    "CP2",
    "PP2 × TP2+SP, EP2, 2 virtual stages, full recompute",
}


def test_layouts_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    """Scores, losses, gradients of every class of weights, two updates; export, resume and checkpoints to the bit."""
    chosen = [layout for layout in LAYOUTS if layout.name in IN_CI]
    assert len(chosen) == len(IN_CI)
    for layout, errors, bits in rows(chosen, tmp_path):
        wrong = {name: value for name, value in errors.items() if not value <= BOUND}
        wrong |= {name: same for name, same in bits.items() if not same}
        assert not wrong, f"{layout.name}: {wrong}"


# --- what a rank gets -------------------------------------------------------------------------------------


def test_tensor_parallel_neighbours_come_first_then_context_replicas_and_stages() -> None:
    p = Parallel(dp=2, tp=2, sp=True, cp=2, pp=2)
    places = [place_of(rank, p, KINDS) for rank in range(p.ranks)]
    assert [(a.pp, a.dp, a.cp, a.tp) for a in places] == sorted((a.pp, a.dp, a.cp, a.tp) for a in places)
    assert [a.reports for a in places] == [False] * 8 + [True, False, False, False] * 2


@pytest.mark.parametrize(
    ("parallel", "columns"),
    [
        (Parallel(), [(0, 1, 2, 3)]),
        (Parallel(pp=2), [(0,), (1, 2, 3)]),  # 4 + 3 layers, of which the first 3 are dense
        (Parallel(pp=2, pp_layers=[2, 5]), [(), (0, 1, 2, 3)]),
        (Parallel(pp=2, vpp=2), [(1, 2), (0, 3)]),  # 2 + 2 + 2 + 1 layers, in turn
    ],
)
def test_a_stage_replays_its_own_layers(parallel: Parallel, columns: list[tuple[int, ...]]) -> None:
    found = [place_of(rank, parallel, KINDS) for rank in range(parallel.pp)]
    assert [place.moe_columns for place in found] == columns
    assert [layer for stage in stage_layers(7, parallel) for layer in stage] == list(range(7))


def check_padding(before: MicroBatch, after: MicroBatch) -> None:
    """What was there is there, in order; the rest has no part in loss or statistics, and its experts are distinct."""
    real = after.sample != PADDING
    for name in ("tokens", "targets", "response", "logp_engine", "advantage", "weight", "sample", "routes", "logp_old"):
        np.testing.assert_array_equal(getattr(after, name)[real], getattr(before, name))
    assert not after.response[~real].any() and not after.weight[~real].any()
    assert after.routes is not None and after.routes.dtype == np.uint8
    ordered = np.sort(after.routes, axis=-1)
    assert (ordered[..., 1:] != ordered[..., :-1]).all() and ordered.max() < tiny.EXPERTS


def test_padding_makes_a_pack_even_and_takes_no_part() -> None:
    batch = tiny.micro_batch([13, 8, 5])
    assert pad(batch, Parallel(), tiny.EXPERTS) is batch
    after = pad(batch, Parallel(tp=4, sp=True), tiny.EXPERTS)
    assert after.cu_tokens.tolist() == [0, 13, 21, 26, 28]
    check_padding(batch, after)
    after = pad(batch, Parallel(cp=2, tp=2, sp=True), tiny.EXPERTS)
    assert after.cu_tokens.tolist() == [0, 16, 24, 32]
    assert (after.sample[13:16] == PADDING).all() and (after.sample[:13] == 0).all()
    check_padding(batch, after)
    after = pad(batch, Parallel(cp=2, tp=8, sp=True), tiny.EXPERTS)
    assert after.cu_tokens.tolist() == [0, 16, 24, 32]  # 32 = 2 · cp · tp
    after = pad(tiny.micro_batch([13, 8]), Parallel(cp=2, tp=8, sp=True), tiny.EXPERTS)
    assert after.cu_tokens.tolist() == [0, 16, 24, 32]
    after = pad(batch, Parallel(), tiny.EXPERTS, block=32)
    assert after.cu_tokens.tolist() == [0, 13, 21, 26, 32]
    after = pad(batch, Parallel(cp=2, tp=2, sp=True), tiny.EXPERTS, block=32)
    assert after.cu_tokens.tolist() == [0, 16, 24, 32, 128]
    check_padding(batch, after)


def test_padding_is_spread_over_all_experts() -> None:
    empty = padding_only(tiny.micro_batch([9]), Parallel(tp=8, sp=True), tiny.EXPERTS)
    assert len(empty.tokens) == 8 and (empty.sample == PADDING).all()
    assert empty.routes is not None
    for layer in range(tiny.MOE_LAYERS):
        chosen = np.bincount(empty.routes[1:, layer].ravel(), minlength=tiny.EXPERTS)  # row 0 is the other batch's
        assert chosen.max() - chosen.min() <= 1


def test_replicas_run_equally_many_micro_batches_in_groups_of_an_interleaved_pipeline() -> None:
    batches = [tiny.micro_batch([n]) for n in (5, 6, 7)]
    counts = [len(part) for part in even_out([batches, batches[:1], []], Parallel(dp=3), tiny.EXPERTS)]
    assert counts == [3, 3, 3]
    (filled,) = even_out([batches], Parallel(pp=2, vpp=2), tiny.EXPERTS)
    assert len(filled) == 4 and filled[:3] == batches
    assert not filled[3].response.any() and not filled[3].weight.any()
    assert even_out([[], []], Parallel(dp=2), tiny.EXPERTS) == [[], []]


def test_context_ranks_have_an_early_and_a_late_chunk_of_each_sample() -> None:
    cu = np.array([0, 8, 12], np.int32)
    assert context_rows(cu, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert context_rows(cu, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize(
    "parallel",
    [Parallel(), Parallel(tp=2, sp=True), Parallel(cp=2), Parallel(cp=2, tp=2, sp=True, pp=2, vpp=2), Parallel(pp=2)],
)
def test_every_route_goes_to_exactly_one_rank_of_a_replica(parallel: Parallel) -> None:
    batch = pad(tiny.micro_batch([13, 8, 6]), parallel, tiny.EXPERTS)
    assert batch.routes is not None
    whole = np.full_like(batch.routes, 255)
    places: list[Place] = [place_of(rank, parallel, KINDS) for rank in range(parallel.ranks)]
    for place in places:
        cut = cut_routes(batch, place)
        assert cut.routes is not None and cut.routes.dtype == np.uint8
        here = np.ix_(routed_rows(batch.cu_tokens, place), place.moe_columns)
        assert (whole[here] == 255).all()
        whole[here] = cut.routes
        assert cut.tokens is batch.tokens
    np.testing.assert_array_equal(whole, batch.routes)


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [
        (Parallel(tp=4, sp=True), "trainer.parallel.tp = 4: must divide the model's 2 KV heads"),
        (Parallel(tp=3, sp=True), "trainer.parallel.tp = 3: must divide the model's 4 attention heads"),
        (Parallel(dp=3, ep=3), "trainer.parallel.ep = 3: must divide the model's 16 experts"),
        (Parallel(dp=3, etp=3), "trainer.parallel.etp = 3: must divide the model's 32 columns of an expert"),
        (Parallel(tp=2), "trainer.parallel.sp = false: with trainer.parallel.tp = 2 every rank would send the same"),
        (Parallel(sp=True), "trainer.parallel.sp = true: splits tokens over the tp ranks, and trainer.parallel.tp = 1"),
        (Parallel(dp=2, ep=4), r"trainer.parallel.ep = 4: ep · etp = 4 must divide dp · tp · cp = 2"),
        (Parallel(vpp=2), "trainer.parallel.vpp = 2: virtual stages are for a pipeline"),
        (Parallel(pp=4, vpp=2), "trainer.parallel.pp = 4: pp · vpp = 8 stages, but the model has 7 layers"),
        (Parallel(pp=2, pp_layers=[7]), "trainer.parallel.pp_layers = [7]: names 1 stages, but there are pp · vpp = 2"),
        (Parallel(pp=2, pp_layers=[3, 3]), "trainer.parallel.pp_layers = [3, 3]: 6 layers, but the model has 7"),
    ],
)
def test_what_cannot_be_laid_out_names_its_key(parallel: Parallel, problem: str) -> None:
    hf = json.loads((tiny.checkpoint() / "config.json").read_text())
    problems = check_layout(hf, parallel)
    assert any(found.startswith(problem) for found in problems), problems
    with pytest.raises(ValueError, match=r"trainer\.parallel\."):
        tiny.trainer(parallel=parallel)


def test_all_layouts_of_the_table_are_allowed() -> None:
    hf = json.loads((tiny.checkpoint() / "config.json").read_text())
    assert all(not check_layout(hf, layout.parallel) for layout in LAYOUTS)


def test_a_fused_router_is_refused() -> None:
    from beam_rl.megatron.router import BeamRouter

    trainer = tiny.trainer()
    trainer.config.moe_router_fusion = True
    with pytest.raises(ValueError, match="moe_router_fusion: .* a replayed choice would be ignored"):
        BeamRouter(trainer.config)


# --- checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (5, 4), (1, 6), (3, 2, 4)])
def test_a_range_of_a_tensor_is_cut_into_boxes_that_fill_it(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(1.0, 1 + int(np.prod(shape))).reshape(shape)
    size = tensor.numel()
    flat = torch.cat([torch.full((3,), -1.0), tensor.view(-1), torch.full((3,), -1.0)])  # reaches beyond both ends
    for start in range(-3, size):
        for end in range(start, size + 4):
            found = torch.zeros(shape)
            for box, offset in _boxes(flat[start + 3 : end + 3], start, shape):
                where = tuple(slice(o, o + n) for o, n in zip(offset, box.shape, strict=True))
                assert not found[where].any()
                found[where] = box
            inside = torch.zeros(size)
            inside[max(start, 0) : max(end, 0)] = tensor.view(-1)[max(start, 0) : max(end, 0)]
            assert torch.equal(found.view(-1), inside)


def _train_bf16(rank: int, world: int, master: str, folder: Path) -> None:
    trainer = layouts.Trainer(
        str(tiny.checkpoint("bf16")), tiny.settings(precision="bf16", parallel=Parallel(dp=world)), rank, world, master
    )
    trainer.update([tiny.micro_batch([14, 9], seed=rank)], tiny.squared_objective, layouts.LR)
    trainer.save(folder)
    trainer.close()


def test_the_distributed_optimizers_fp32_weights_move_to_another_layout(tmp_path: Path) -> None:
    master = tiny.meeting_point()
    tiny.in_new_processes(_train_bf16, *[(rank, 2, master, tmp_path / "two") for rank in range(2)])
    alone = tiny.trainer(precision="bf16")
    alone.load(tmp_path / "two")
    alone.save(tmp_path / "one")
    theirs, ours = (layouts.read_checkpoint(tmp_path / name) for name in ("two", "one"))
    assert ours.keys() == theirs.keys() and any(name.startswith("optimizer.main.") for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
