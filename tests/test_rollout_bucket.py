"""Packing of named tensors into buckets, and out of them."""

from collections.abc import Iterable, Iterator
from itertools import cycle

import pytest
import torch
from torch import Tensor

from beam_rl.rollout.sync.bucket import ALIGNMENT, Assembler, Bucket, from_metadata, pack, to_metadata
from beam_rl.rollout.sync.checksum import BLOCK_WORDS, checksum, copy_with_checksum

CPU = torch.device("cpu")


def tensors() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [("a", (3, 5)), ("b", (1,)), ("c", (100,)), ("d", (2, 2, 2)), ("e", ()), ("none", (0, 3)), ("f", (7,))]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.uint8, torch.float32, torch.float32, torch.bfloat16]
    return [
        (name, (torch.randn(shape, generator=generator) * 50).to(dtype))
        for (name, shape), dtype in zip(shapes, dtypes, strict=True)
    ]


def travel(
    given: Iterable[tuple[str, Tensor]], bucket_bytes: int, at_once: bool = False
) -> Iterator[tuple[Bucket, list[tuple[str, Tensor]]]]:
    """Each bucket and what the other end makes of it; there are two buffers, as in a sync."""
    buffers = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(2)]
    other_end = Assembler(CPU)
    take_out = other_end.tensors_at_once if at_once else other_end.tensors
    for bucket in pack(given, cycle(buffers), checksums=not at_once):
        data = buffers[bucket.number % 2][: bucket.nbytes].clone()
        got = list(take_out(from_metadata(to_metadata(bucket)), data))
        data.fill_(255)  # what came out has its own memory
        yield bucket, got


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("bucket_bytes", [16, 64, 128, 10_000])
def test_tensors_come_out_bit_for_bit_in_their_order_whatever_the_bucket_holds(
    bucket_bytes: int, at_once: bool
) -> None:
    got = [each for _, some in travel(tensors(), bucket_bytes, at_once) for each in some]
    assert [name for name, _ in got] == [name for name, _ in tensors()]
    for (_, mine), (_, theirs) in zip(got, tensors(), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)


def test_larger_tensor_is_cut_and_every_other_travels_whole() -> None:
    buckets = [bucket for bucket, _ in travel(tensors(), 128)]
    assert all(bucket.nbytes <= 128 for bucket in buckets)
    pieces = [entry for bucket in buckets for entry in bucket.entries]
    assert [(p.start, p.nbytes) for p in pieces if p.name == "c"] == [(0, 128), (128, 128), (256, 128), (384, 16)]
    assert all(p.nbytes == p.whole_bytes for p in pieces if p.name != "c")


@pytest.mark.parametrize("bucket_bytes", [16, 64, 400, 10_000])  # the largest tensor has 400 bytes
def test_the_last_bucket_says_that_it_is_and_no_other(bucket_bytes: int) -> None:
    for given in (tensors(), tensors()[:3], tensors()[4:6]):
        last = [bucket.last for bucket, _ in travel(given, bucket_bytes)]
        assert last == [False] * (len(last) - 1) + [True]


def test_one_bucket_holds_everything_that_fits() -> None:
    assert len(list(travel(tensors(), 10_000))) == 1


def test_entries_are_aligned_and_payload_leaves_out_the_gaps() -> None:
    ((bucket, _),) = travel(tensors(), 10_000)
    assert all(entry.offset % ALIGNMENT == 0 for entry in bucket.entries)
    assert bucket.payload_bytes == sum(t.nbytes for _, t in tensors()) < bucket.nbytes


def test_tensors_are_asked_for_one_at_a_time() -> None:
    asked = []

    def produce() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors():
            asked.append(name)
            yield name, tensor

    next(travel(produce(), 128))
    assert asked == ["a", "b", "c"]  # the first bucket is complete when its successor's first tensor is known


@pytest.mark.parametrize("bucket_bytes", [16, 112])
def test_non_contiguous_tensor_is_packed_by_value(bucket_bytes: int) -> None:
    turned = torch.arange(12.0).view(2, 6).t()
    got = [each for _, some in travel([("t", turned)], bucket_bytes) for each in some]
    assert [name for name, _ in got] == ["t"] and torch.equal(got[0][1], turned)


def test_damage_is_found_before_the_tensor_is_handed_out_and_named() -> None:
    buffer = torch.empty(10_000, dtype=torch.uint8)
    (bucket,) = pack(tensors(), iter([buffer]), checksums=True)
    buffer[bucket.entries[2].offset + 5] ^= 1
    got = []
    with pytest.raises(ValueError, match="bucket 0 arrived damaged: c has not the sender's checksum"):
        got.extend(Assembler(CPU).tensors(bucket, buffer))
    assert [name for name, _ in got] == ["a", "b"]


def test_no_tensors_make_no_bucket() -> None:
    assert list(travel([], 128)) == []


@pytest.mark.parametrize("size", [8, 8_003, 8 * 300 * BLOCK_WORDS + 8 * 77 + 5])
def test_checksum_sees_every_change_and_exchange(size: int) -> None:
    data = torch.randint(1, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    places = {0, size // 2, size - 1}
    found = {checksum(data)}
    for place in places:
        changed = data.clone()
        changed[place] ^= 128
        found.add(checksum(changed))
    found |= {checksum(data[:-1]), checksum(data.roll(8)), checksum(data.roll(1))}
    if size > 8:
        page = min(4096, size // 3)
        exchanged = data.clone()
        exchanged[:page], exchanged[-page:] = data[-page:], data[:page]
        found.add(checksum(exchanged))
    rolled_is_itself = size == 8
    assert len(found) == 1 + len(places) + 3 + (size > 8) - rolled_is_itself


@pytest.mark.parametrize("size", [0, 7, 8, 4096, 5 * 2**20 + 3])
@pytest.mark.parametrize("shift", [0, 2])
def test_copy_has_the_checksum_of_its_bytes_from_any_address(size: int, shift: int) -> None:
    data = torch.randint(256, (size + shift,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))[shift:]
    copy = torch.empty(size, dtype=torch.uint8)
    assert copy_with_checksum(data, copy) == checksum(data.clone())
    assert torch.equal(copy, data)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_tensors_that_a_gpu_makes_late_and_frees_early_are_packed_as_they_were() -> None:
    """Slow work keeps the GPU behind, and a tensor's memory is soon another one's."""
    size, count = 2**22, 24
    device = torch.device("cuda", 0)
    slow = torch.randn(4096, 4096, device=device)

    def made() -> Iterator[tuple[str, Tensor]]:
        for _ in range(20):
            torch.mm(slow, slow)
        for number in range(count):
            yield str(number), torch.full((size,), float(number), device=device)

    buffers = [torch.empty(5 * 4 * size, dtype=torch.uint8, device=device) for _ in range(5)]
    seen = {
        entry.name: buffers[packed.number][entry.offset :][: entry.nbytes].view(torch.float32).aminmax()
        for packed in pack(made(), iter(buffers))
        for entry in packed.entries
    }
    assert {name: (low.item(), high.item()) for name, (low, high) in seen.items()} == {
        str(number): (number, number) for number in range(count)
    }
