"""Slices come out of safetensors files as safetensors itself gives them, and nothing else is read."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from beam_rl.errors import InputError
from beam_rl.megatron import slice_reader
from beam_rl.megatron.slice_reader import SafetensorsFolder


@dataclass(frozen=True)
class Part:
    name: str
    rows: range
    columns: range | None
    into: int
    shape: tuple[int, ...] | None = None  # None: as in the fixture's files

    @property
    def whole(self) -> tuple[int, ...]:
        return self.shape or {"a": (40, 6000), "v": (7,), "b": (30, 8)}.get(self.name, ())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    bf16 = {"a": torch.randn(40, 6000, generator=generator).bfloat16(), "v": torch.randn(7, generator=generator)}
    save_file(bf16, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.randn(30, 8, generator=generator)}, tmp_path / "model-2.safetensors")
    return tmp_path


def sliced(folder: Path, part: Part) -> torch.Tensor:
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            if part.name in set(opened.keys()):
                whole = opened.get_slice(part.name)
                rows = slice(part.rows.start, part.rows.stop)
                if part.columns is None:
                    return whole[rows]
                return whole[rows, part.columns.start : part.columns.stop]
    raise KeyError(part.name)


@pytest.mark.parametrize(
    ("part", "read_bytes"),
    [
        (Part("a", range(8, 24), None, 0), 16 * 12_000),
        (Part("a", range(40), range(3000, 6000), 0), 40 * 6_000),  # a row's part is more than a page: it alone
        (Part("a", range(40), range(0, 100), 0), 40 * 12_000),  # less than a page: the whole row
        (Part("v", range(2, 5), None, 0), 3 * 4),
        (Part("b", range(30), None, 0), 30 * 32),
    ],
)
def test_a_slice_is_what_safetensors_gives(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: Part, read_bytes: int
) -> None:
    monkeypatch.setattr(slice_reader, "BLOCK_BYTES", 50_000)  # so that a slice is several blocks
    wanted = sliced(folder, part)
    target = torch.zeros_like(wanted)
    assert SafetensorsFolder(folder).read_into([(target, [part])]) == read_bytes
    assert torch.equal(target, wanted)


def test_slices_of_several_files_fill_one_parameter_in_its_own_type(folder: Path) -> None:
    target = torch.zeros(9, 8, dtype=torch.bfloat16)
    parts = [Part("b", range(20, 25), None, 0), Part("b", range(0, 4), None, 5)]
    SafetensorsFolder(folder).read_into([(target, parts)])
    assert torch.equal(target, torch.cat([sliced(folder, part) for part in parts]).bfloat16())


def test_what_is_damaged_or_does_not_fit_is_refused_in_one_line(folder: Path) -> None:
    def read(name: str, rows: int, width: int) -> None:
        part = Part(name, range(rows), None, 0, (rows, width))
        SafetensorsFolder(folder).read_into([(torch.zeros(rows, width), [part])])

    with pytest.raises(InputError, match="no tensor c"):
        read("c", 1, 1)
    with pytest.raises(InputError, match=r"b has the shape \[30, 8\]"):
        read("b", 30, 9)
    with pytest.raises(InputError, match=r"b has the shape \[30, 8\]"):
        read("b", 31, 8)
    with pytest.raises(InputError, match=r"b has the shape \[30, 8\], and config.json says \[29, 8\]"):
        read("b", 29, 8)  # whose rows are there, with one too many
    whole = (folder / "model-2.safetensors").read_bytes()
    (folder / "model-2.safetensors").write_bytes(whole[:-100])
    with pytest.raises(InputError, match="model-2.safetensors: ends before byte"):
        read("b", 30, 8)
    (folder / "model-2.safetensors").write_bytes(whole[:20])
    with pytest.raises(InputError, match="model-2.safetensors: no safetensors file"):
        read("b", 30, 8)
