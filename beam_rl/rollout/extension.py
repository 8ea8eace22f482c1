"""Calls that any vLLM worker answers (`worker_extension_cls`). Replies are bytes and lists: nothing is pickled."""

from typing import Any

import torch

from beam_rl.rollout.names import held_tensor


class Extension:
    model_runner: Any

    def read_weight(self, name: str) -> list[Any]:
        """[dtype, shape, bytes] of what the model holds under a checkpoint's name. KeyError if it has no such tensor."""
        tensor = held_tensor(self.model_runner.get_model(), name).detach().cpu().contiguous()
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw]
