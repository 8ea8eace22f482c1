"""Calls that any vLLM worker answers (`worker_extension_cls`). Replies are bytes and lists: nothing is pickled."""

from typing import Any

import numpy as np
import torch

from beam_rl.rollout.names import held_tensor


class Extension:
    model_runner: Any
    probe: Any = None

    def read_weight(self, name: str) -> list[Any]:
        """[dtype, shape, bytes] of what the model holds under a checkpoint's name. KeyError if it has no such tensor."""
        tensor = held_tensor(self.model_runner.get_model(), name).detach().cpu().contiguous()
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw]

    def begin_probe(self, routes: bytes, shape: list[int]) -> None:
        """Records every sub-layer of what runs from now on, with the experts of `routes`: int64, or no bytes."""
        from beam_rl.rollout.probe import Probe

        self.cancel_probe()
        rows = torch.from_numpy(np.frombuffer(routes, np.int64).reshape(shape).copy()) if routes else None
        self.probe = Probe(self.model_runner.get_model(), rows)

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
