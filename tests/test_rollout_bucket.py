"""Packing of named tensors into buckets."""

import pytest
import torch
from torch import Tensor

from beam_rl.rollout.sync.bucket import ALIGNMENT, from_metadata, pack, to_metadata, unpack


def tensors() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [("a", (3, 5)), ("b", (1,)), ("c", (100,)), ("d", (2, 2, 2)), ("e", ()), ("f", (7,))]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.uint8, torch.float32, torch.bfloat16]
    return [
        (name, (torch.randn(shape, generator=generator) * 50).to(dtype))
        for (name, shape), dtype in zip(shapes, dtypes, strict=True)
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 128, 10_000])
def test_unpacked_tensors_are_the_packed_ones_bit_for_bit(bucket_bytes: int) -> None:
    got = []
    for bucket in pack(tensors(), bucket_bytes):
        meta = to_metadata(bucket)
        assert meta.pop("nbytes") == len(bucket.data)
        got += [(name, t.clone()) for name, t in unpack(from_metadata(**meta), bucket.data)]
    assert [name for name, _ in got] == [name for name, _ in tensors()]
    for (_, mine), (_, theirs) in zip(got, tensors(), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_buckets_stay_within_their_size_and_a_larger_tensor_goes_alone() -> None:
    sizes = [(len(b.entries), len(b.data)) for b in pack(tensors(), 128)]
    assert (1, 400) in sizes
    assert all(size <= 128 for count, size in sizes if count > 1)
    assert len(sizes) == 3


def test_one_bucket_holds_everything_that_fits() -> None:
    assert len(list(pack(tensors(), 10_000))) == 1


def test_entries_are_aligned_and_payload_leaves_out_the_gaps() -> None:
    (bucket,) = pack(tensors(), 10_000)
    assert all(entry.offset % ALIGNMENT == 0 for entry in bucket.entries)
    assert bucket.payload_bytes == sum(t.nbytes for _, t in tensors()) < len(bucket.data)


def test_tensors_are_asked_for_one_at_a_time() -> None:
    asked = []

    def produce():
        for name, tensor in tensors():
            asked.append(name)
            yield name, tensor

    next(iter(pack(produce(), 128)))
    assert asked == ["a", "b", "c"]  # the first bucket is complete when its successor's first tensor is known


def test_non_contiguous_tensor_is_packed_by_value() -> None:
    turned = torch.arange(6.0).view(2, 3).t()
    (bucket,) = pack([("t", turned)], 100)
    ((_, got),) = unpack(bucket.entries, bucket.data)
    assert torch.equal(got, turned)


def test_no_tensors_make_no_bucket_and_no_room_is_refused() -> None:
    assert list(pack([], 100)) == []
    with pytest.raises(ValueError, match="bucket_bytes = 0"):
        next(pack(tensors(), 0))
