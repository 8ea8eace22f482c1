"""What a request is to vLLM, and what of vLLM's output is its completion."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beam_rl.rollout.routes import Routes
from beam_rl.samples import Completion, Request


def stop_ids(model: str) -> tuple[int, ...]:
    """The checkpoint's end-of-sequence ids: generation_config.json's, else config.json's."""
    for file in ("generation_config.json", "config.json"):
        path = Path(model, file)
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    raise ValueError(f"{model}: neither generation_config.json nor config.json names an eos_token_id")


def check_fits(request: Request, max_model_len: int) -> None:
    """Raises ValueError for a request that could outgrow the engine's context."""
    prompt, response = len(request.prompt_ids), request.max_tokens
    if prompt + response > max_model_len:
        raise ValueError(
            f"request {request.id}: {prompt} prompt tokens + max_tokens {response} exceed max_model_len {max_model_len}"
        )


def sampling_params(request: Request, stop_token_ids: Sequence[int]) -> Any:
    """vLLM's `SamplingParams`: the sampled token's log-probability alone, everything at the end."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,  # the ids above are all there is
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,  # in a list, not as an object a token
        stop=list(request.stop_strings),
        include_stop_str_in_output=True,
        skip_special_tokens=False,  # a special token may be such a string
        detokenize=bool(request.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def text_of_last(tokenizer: Any, token_ids: Sequence[int], count: int) -> str:
    """What the last `count` tokens add to the text of those before, without a character of which more bytes are to come."""
    before, whole = (
        tokenizer.decode(ids, skip_special_tokens=False) for ids in (list(token_ids)[:-count], list(token_ids))
    )
    return str(whole[len(before) :]).rstrip("\ufffd")


def make_completion(
    request: Request, output: Any, routes: Routes | None, version: int, routing_replay: bool
) -> Completion:
    """A completion from vLLM's output. Whoever replays the routes counts their rows and leaves out what lacks some.

    An interrupted response without the routes of all its tokens (it was waiting to be computed again) is given up.
    """
    if output.finish_reason == "abort" and routing_replay:
        rows = len(request.prompt_ids) + len(output.token_ids) - 1
        if not output.token_ids or routes is None or len(routes) < rows:
            return Completion.not_begun(request, version)
        routes = routes[:rows]
    tokens = np.asarray(output.token_ids, np.int32)
    logp = np.asarray(output.logprobs.logprobs, np.float32)
    if len(logp) != len(tokens):
        raise RuntimeError(f"request {request.id}: {len(tokens)} tokens came with {len(logp)} log-probabilities")
    ended_by = output.stop_reason if isinstance(output.stop_reason, str) else None
    return Completion(request.id, tokens, logp, routes, output.finish_reason, version, ended_by=ended_by)


def routes_of_tokens(routes: Routes | None, output: Any) -> Routes | None:
    """The rows of all tokens but the last one."""
    return None if routes is None else routes[: len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1]
