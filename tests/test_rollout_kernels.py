"""LoRA's decode kernels against plain torch: on a GPU, or in Triton's interpreter on a machine without one."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
from beam_rl.rollout.kernels import experts, linear

ON_GPU, INTERPRETED = torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(not ON_GPU and not INTERPRETED, reason="runs on a GPU, or where TRITON_INTERPRET=1")
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # the interpreter computes in numpy, which has no bfloat16
TOLERANCE = 2e-2 if ON_GPU else 1e-5


def random(*shape: int, std: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * std).to(DTYPE)


def slots_of_tokens(tokens: int, slots: int) -> torch.Tensor:
    """Every slot, and at either side one that is none."""
    return torch.arange(tokens, dtype=torch.int32, device=DEVICE) % (slots + 2) - 1


def grouped(ids: torch.Tensor, size: int, n_experts: int) -> experts.Blocks:
    """Pairs by expert, each expert's padded to whole blocks; some unused blocks at the end, as vLLM's alignment has."""
    flat, pairs, of_block = ids.flatten().tolist(), [], []
    for e in range(n_experts):
        mine = [p for p, other in enumerate(flat) if other == e]
        mine += [len(flat)] * (-len(mine) % size)
        pairs += mine
        of_block += [e] * (len(mine) // size)
    used = len(pairs)
    as_int = {"dtype": torch.int32, "device": DEVICE}
    return experts.Blocks(
        torch.tensor(of_block + [-1, 0], **as_int),
        torch.tensor(pairs + [7] * 2 * size, **as_int),
        torch.tensor([used], **as_int),
        size,
    )


@runs_kernels
@pytest.mark.parametrize("fused", [False, True], ids=["gate and up apart", "gate and up fused"])
@pytest.mark.parametrize("block", [16, 64, None], ids=["blocks of 16", "blocks of 64", "pair by pair"])
@pytest.mark.parametrize("slots", [1, 2])
def test_expert_lora_kernels_compute_what_plain_torch_does(fused: bool, block: int | None, slots: int) -> None:
    torch.manual_seed(0)
    tokens, top_k, n_experts, rank = (32, 8, 64, 8) if ON_GPU else (5, 2, 6, 2)
    hidden, inner = (1024, 320) if ON_GPU else (48, 40)
    ids = torch.stack([torch.randperm(n_experts, device=DEVICE)[:top_k] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, top_k, device=DEVICE)
    of_token = slots_of_tokens(tokens, slots)
    x, gate_up = random(tokens, hidden), random(tokens * top_k, 2 * inner)
    w2 = random(n_experts, hidden, inner, std=inner**-0.5)
    halves = 1 if fused else 2
    adapter = experts.ExpertAdapter(
        tuple(random(slots, n_experts, rank, hidden, std=hidden**-0.5) for _ in range(halves)),
        tuple(random(slots, n_experts, 2 * inner // halves, rank) for _ in range(halves)),
        random(slots, n_experts, rank, inner, std=inner**-0.5),
        random(slots, n_experts, hidden, rank),
    )
    blocks = grouped(ids, block, n_experts) if block else experts.Blocks(ids.flatten(), None, None, 16)
    small = {"shrink_k": 16, "shrink_splits": 2, "activate_n": 16, "expand_n": 16, "combine_n": 16}
    tiles = experts.Tiles(**({} if ON_GPU else small))

    t_in = experts.shrink(x, adapter, of_token, blocks, top_k, tiles)
    active, y = (
        torch.full((tokens * top_k, inner), torch.nan, dtype=DTYPE, device=DEVICE),
        torch.full_like(x, torch.nan),
    )
    t_out = experts.activate(gate_up, t_in, adapter, of_token, ids, active, tiles)
    want_active, want = experts.reference(x, gate_up, w2, adapter, of_token, weights, ids)
    flat = ids.flatten().long()
    down = torch.stack([w2[e].float() @ row.float() for e, row in zip(flat.tolist(), active, strict=True)])
    down = (weights.flatten()[:, None] * down).to(DTYPE)
    experts.combine(down, experts.expand(t_out, adapter, of_token, weights, ids, tiles), y, tiles)

    assert (active - want_active).float().norm() < TOLERANCE * want_active.float().norm()
    assert (y - want).float().norm() < TOLERANCE * want.float().norm()


@runs_kernels
@pytest.mark.parametrize("widths", [(96,), (64, 16, 16), (64, 16, 16, 64)])
@pytest.mark.parametrize("slots", [1, 2])
def test_linear_lora_kernels_compute_what_plain_torch_does(widths: tuple[int, ...], slots: int) -> None:
    torch.manual_seed(0)
    tokens, hidden, rank = (33, 1024, 64) if ON_GPU else (5, 48, 4)
    widths = tuple(w * 16 + 8 for w in widths) if ON_GPU else widths
    x, y = random(tokens, hidden), random(tokens, sum(widths))
    a = [random(slots, 1, rank, hidden, std=hidden**-0.5) for _ in widths]
    b = [random(slots, 1, w, rank) for w in widths]
    of_token = slots_of_tokens(tokens + 3, slots)
    want = (y.float() + linear.reference(x, a, b, of_token).float()).to(DTYPE)
    tiles = linear.Tiles() if ON_GPU else linear.Tiles(shrink_k=16, shrink_splits=2, expand_n=32)
    linear.expand(y, linear.shrink(x, a, of_token, tiles), b, of_token, tiles)
    assert (y - want).float().norm() < TOLERANCE * want.float().norm()


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels themselves run")
def test_the_kernels_pass_in_tritons_interpreter() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    kernels = [__file__, "-k", "compute_what_plain_torch_does"]
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *kernels]
    interpreted = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=interpreted, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "18 passed" in done.stdout, done.stdout[-3000:]


def test_the_kernels_refuse_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    compat_gpu = pytest.importorskip("beam_rl.rollout.compat_gpu")
    monkeypatch.setattr(compat_gpu, "installed", lambda: ("vllm", "0.34.1"))
    with pytest.raises(
        RuntimeError, match=r"vllm 0\.34\.1 is installed; beam-rl's LoRA kernels were written for vllm 0\.33"
    ):
        compat_gpu.install()
