"""Who gets which part of a GPU."""

import pytest

from beam_rl.errors import InputError
from beam_rl.gpus import gpu_share


@pytest.mark.parametrize(
    ("gpus", "ranks", "engines", "share"),
    [(0, 4, 2, 0.0), (6, 4, 2, 1.0), (8, 4, 2, 1.0), (1, 1, 1, 0.5), (1, 1, 2, 0.3333)],
)
def test_each_has_a_gpu_or_all_share_the_only_one(gpus: int, ranks: int, engines: int, share: float) -> None:
    assert gpu_share(gpus, ranks, engines) == share
    assert gpu_share(gpus, ranks, engines) * (ranks + engines) <= max(gpus, 0)


@pytest.mark.parametrize(("gpus", "ranks", "engines"), [(2, 2, 1), (1, 2, 1), (5, 4, 2)])
def test_too_few_gpus_are_refused_with_the_numbers(gpus: int, ranks: int, engines: int) -> None:
    with pytest.raises(InputError, match=f"has {ranks} ranks and rollout.engines = {engines}: .* Ray has {gpus}$"):
        gpu_share(gpus, ranks, engines)
