"""Calls that any vLLM worker answers (`worker_extension_cls`). Replies are bytes and lists: nothing is pickled."""

from typing import Any

import numpy as np
import torch

from beam_rl.checksum import checksum
from beam_rl.rollout.names import held_tensor


class Extension:
    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any
    probe: Any = None
    adapter: Any = None  # a HeldAdapter, from the first update on
    staged: Any = None  # a Stage, during an update

    def read_weight(self, name: str) -> list[Any]:
        """[dtype, shape, bytes] of what this worker holds under a checkpoint's name, [] of another stage's layer.

        KeyError if there is no such tensor.
        """
        from beam_rl.rollout import compat

        try:
            tensor = held_tensor(self.model_runner.get_model(), name).detach().cpu().contiguous()
        except (KeyError, AttributeError):  # the latter of a layer that this stage has a placeholder for
            if compat.has_stages():
                return []
            raise
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw]

    def begin_probe(self, routes: bytes, shape: list[int], sublayers: bool) -> None:
        """Looks at what runs from now on, with the experts of `routes`: int64, or no bytes. sublayers: records them."""
        from beam_rl.rollout.probe import Probe

        self.cancel_probe()
        rows = torch.from_numpy(np.frombuffer(routes, np.int64).reshape(shape).copy()) if routes else None
        self.probe = Probe(self.model_runner, rows, sublayers)

    def take_probe(self, targets: list[int], temperature: float) -> list[Any]:
        """[[layer, sub-layer, shape, float32 bytes], …] of what ran since `begin_probe`: the tokens before `targets`."""
        probe, self.probe = self.probe, None
        records = probe.finish(torch.tensor(targets), temperature).records()
        return [[layer, name, list(rows.shape), rows.tobytes()] for (layer, name), rows in records.items()]

    def cancel_probe(self) -> None:
        """Leaves the model as it was, if a probe is under way."""
        if self.probe is not None:
            self.probe.stop()
            self.probe = None

    def sync_place(self) -> list[str]:
        """The fields of this worker's `sync.place.Place`."""
        from beam_rl.rollout.sync.place import here

        return list(here(self.weight_transfer_engine.device))

    def abandon_weights(self) -> None:
        """Forgets an update of all weights that was left half way; the model may be a mixture of two versions."""
        from beam_rl.rollout import compat

        self.weight_transfer_engine.forget()
        compat.abandon_weight_update(self)

    def begin_adapter(self) -> None:
        """Opens an update of the adapter; one that was under way is forgotten."""
        from beam_rl.rollout.adapter import HeldAdapter, of_config

        if self.adapter is None:
            adapter, config = of_config(self.vllm_config), self.vllm_config.model_config.hf_config
            if adapter is None:
                raise RuntimeError("this engine was started without an adapter")
            self.adapter = HeldAdapter(adapter, config.to_dict(), self.model_runner)
        self.weight_transfer_engine.begin(torch.device("cpu"))  # vLLM keeps it there, beside the slot
        self.staged = self.adapter.stage()

    def receive_adapter(self, bucket: dict[str, Any]) -> None:
        """Receives and stages one bucket of the adapter's tensors, as the sender announced it."""
        self.staged.add(self.weight_transfer_engine.receive_tensors(bucket))

    def swap_adapter(self, new_id: int) -> list[Any]:
        """[`held_adapter`, ""], or [[], why the staged adapter was refused and nothing changed]."""
        staged, self.staged = self.staged, None
        try:
            tensors = staged.complete()
        except ValueError as refused:
            return [[], str(refused)]
        self.adapter.swap(tensors, new_id)
        return [self.held_adapter(), ""]

    def held_adapter(self) -> list[Any]:
        """[a checksum of this stage's part of the adapter that is held, the digests that it was made of].

        Tensor-parallel neighbours have the same: the digests come from the first one alone.
        """
        from beam_rl.rollout import compat

        digests = self.adapter.digests()
        return [checksum(digests), {} if compat.tensor_rank() else digests]

    def adapter_slots(self) -> list[Any]:
        """[[module, shape of A, shape of B, bytes of both], …] of every adapter slot, leading dimensions slots, experts."""
        from beam_rl.rollout import compat

        slots = compat.adapter_slots(self.model_runner)
        return [[n, list(a.shape), list(b.shape), a.nbytes + b.nbytes] for n, parts in slots.items() for a, b in parts]
