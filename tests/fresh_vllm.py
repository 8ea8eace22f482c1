"""Stock vLLM beside a run: `fresh_vllm.py MODEL ADAPTER OUT` samples with the adapter folder and pickles what it drew.

Nothing of this project but the plugin that adds Beam to vLLM: `LLM(enable_lora=True)` and a `LoRARequest`, as
`vllm serve --enable-lora` has them.
"""

import os
import pickle
import sys
from pathlib import Path

PROMPTS = [[1, 12, 17, 32, 22, 20, 28, 33], [1, 5, 14, 29, 18, 31, 16, 33]]


def main(model: str, adapter: str, out: Path) -> None:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(model, dtype="float32", enforce_eager=True, enable_lora=True, max_lora_rank=16, max_model_len=64)
    params = SamplingParams(max_tokens=16, seed=0, logprobs=0, n=8)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    found = []
    for request in llm.generate(prompts, params, lora_request=LoRARequest("exported", 1, adapter), use_tqdm=False):
        for o in request.outputs:
            logp = [step[token].logprob for token, step in zip(o.token_ids, o.logprobs, strict=True)]
            found.append((list(request.prompt_token_ids), list(o.token_ids), logp))
    out.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
