"""`beam-rl bench NAME`: what a part achieves beside what this machine allows, both measured in the same run.

A bench is one module here with one function: its parameters are the command's options, its docstring the command's
help, and it ends in `show`. Importing this package starts neither torch nor Megatron.
"""

from collections.abc import Callable

from beam_rl.bench.boundary import boundary
from beam_rl.bench.layer import layer
from beam_rl.bench.logprob import logprob
from beam_rl.bench.moe_lora import moe_lora
from beam_rl.bench.nvme import nvme
from beam_rl.bench.replay import replay
from beam_rl.bench.sync import sync

BENCHES: dict[str, Callable[..., None]] = {
    "boundary": boundary,
    "layer": layer,
    "logprob": logprob,
    "moe-lora": moe_lora,
    "nvme": nvme,
    "replay": replay,
    "sync": sync,
}
