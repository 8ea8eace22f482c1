"""The files of a checkpoint: torch's distributed format, in which some tensors may be parts of a rank's state file.

Those are written by giving the file away and read from it as they lie there; the index has them like any other, so another
layout reads them through the same planner. The index is not trusted: no file holds code that is run, see `IndexUnpickler`.
Knows nothing about models and optimizers.
"""

import io
import math
import pickle
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from beam_rl.errors import InputError
from beam_rl.megatron.nvme.snapshot import SUFFIX, SavedBy, SavedState, Snapshot

Place = tuple[str, tuple[int, ...]]  # a tensor's name, and where a box of it begins

_INDEX_CLASSES = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "pathlib": {"PosixPath"},
}


class IndexUnpickler(pickle.Unpickler):
    """torch keeps a distributed checkpoint's index as a pickle; this makes the index's own objects and nothing else.

    Names are taken whole: pickle would follow a dotted one ("os.system") through an allowed module.
    """

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and "." not in name and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the checkpoint's index names {module}.{name}, which does not belong there")


class Writer(dcp.FileSystemWriter):
    """Writes this rank's tensors, but for those that are in its snapshot already."""

    def __init__(self, folder: Path, snapshot: Snapshot | None, places: Mapping[Place, int]) -> None:
        """places: the first byte in the snapshot of each box that is there."""
        super().__init__(folder, thread_count=1)
        self._snapshot, self._places = snapshot, places
        self.saved_by: SavedBy | None = None  # how the snapshot has come into the folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._snapshot is None:
            return super().write_data(plan, planner)
        referred = [item for item in plan.items if _place(item) in self._places]
        rest = replace(plan, items=[item for item in plan.items if _place(item) not in self._places])
        results = super().write_data(rest, planner).wait()
        self.saved_by = self._snapshot.put(Path(self.path))
        return _done(results + [self._result(item, self._snapshot.name) for item in referred])

    def _result(self, item: WriteItem, name: str) -> WriteResult:
        assert item.tensor_data is not None
        nbytes = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        return WriteResult(item.index, nbytes, _StorageInfo(name, self._places[_place(item)], nbytes))


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint whose index is not trusted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            metadata = IndexUnpickler(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()
        except pickle.UnpicklingError as error:
            raise InputError(f"{self.path} is not one of our checkpoints: {error}") from None
        metadata.storage_meta = dcp.metadata.StorageMeta(load_id=self.load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._tensors = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        rest: list[ReadItem] = []
        in_states: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            (in_states[name] if name.endswith(SUFFIX) else rest).append(item)
        super().read_data(replace(plan, items=rest), planner)
        for name, items in in_states.items():
            with SavedState(Path(self.path), name) as state:
                # Block by block: what has been read to check a block is then still in the page cache.
                for item in sorted(items, key=lambda i: state.block_at(self.storage_data[i.storage_index].offset)):
                    self._read(item, state, planner)
        return _done(None)

    def _read(self, item: ReadItem, state: SavedState, planner: LoadPlanner) -> None:
        index, tensor = item.storage_index, self._tensors[item.storage_index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)  # which is all that the index can hold
        assert index.index is not None
        sizes, dtype = tensor.chunks[index.index].sizes, tensor.properties.dtype
        box = state.read(self.storage_data[index].offset, math.prod(sizes) * dtype.itemsize, dtype).view(sizes)
        target = planner.resolve_tensor(item).detach()
        target.copy_(narrow_tensor_by_index(box, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)


def _place(item: WriteItem) -> Place:
    return item.index.fqn, tuple(item.index.offset or ())


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
