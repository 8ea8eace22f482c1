#!/bin/bash
# One GPU with 141 GB, measured: the benches of kernels, sync and engines, and the runs of docs/one_gpu.md. One stage a call.
#   benchmarks/one_h200.sh start|bench|trace|runs|progress|tests OUT [RECIPE KEY=VALUE …]
# OUT: a folder for logs and results. The repository's root is the working folder.
set -u
stage=$1 out=$2
shift 2
mkdir -p "$out"
export RAY_memory_monitor_refresh_ms=0 # several runs on one machine; each asks for little
beam_rl() { python3 -m beam_rl "$@"; }
# Several runs share the GPU: none sizes its KV cache by what the others leave free, and a mini-batch is one portion, but small.
shared="rollout.gpu_memory_utilization=0.14 rollout.engine_args.kv_cache_memory_bytes=6000000000
    rollout.prompts_per_step=40 trainer.token_budget=24576 eval.every=50 checkpoint.every=50"

start() { # the warm start that all runs begin from; cached
    python3 - <<'PYTHON'
import time
from beam_rl.tiny.cache import cached_tiny
from beam_rl.tiny.sizes import SIZES

began = time.time()
show = lambda step, _, loss: step % 25 or print(step, round(loss, 4), round(time.time() - began), flush=True)
folder = cached_tiny(0, "bf16", show, size=SIZES["small"])
print((folder / "warm_start.json").read_text())
PYTHON
}

bench() { # each alone on the GPU
    python3 benchmarks/ipc_ways.py >"$out/ipc_ways.txt" 2>&1
    for name in "sync --no-engine" boundary layer logprob replay moe-lora; do
        beam_rl bench $name --json >"$out/${name%% *}.json" 2>"$out/${name%% *}.err"
    done
}

trace() { # alone on the GPU, where a step's time goes: the trainer's and the engine's operations, then the engine's Python
    beam_rl train recipes/one_gpu_full.yaml trainer.steps=4 "trainer.profile.steps=[3]" "rollout.profile.steps=[3]" eval.every=0 \
        "$@" --out "$out/trace" >"$out/trace.log" 2>&1
    beam_rl train recipes/one_gpu_full.yaml trainer.steps=2 "rollout.profile.steps=[2]" rollout.profile.python=true \
        eval.every=0 "$@" --out "$out/python" >"$out/python.log" 2>&1
    python3 benchmarks/progress.py "$out"/{trace,python}/metrics.jsonl
    head -70 "$out"/{trace,python}/profile/*.txt
}

run() { # NAME RECIPE KEY=VALUE …, in the background
    local name=$1 recipe=$2
    shift 2
    setsid nohup python3 -m beam_rl train "recipes/one_gpu_$recipe.yaml" $shared "$@" --out "$out/$name" \
        >"$out/$name.log" 2>&1 </dev/null &
}

runs() { # all three kinds and the control, at one time
    run full full "$@"
    run lora lora "$@"
    run mxfp8 mxfp8 "$@"
    run shuffled full verifier.shuffle=true trainer.steps=25 "$@"
}

progress() { # a line a run; again and again
    python3 benchmarks/progress.py "$out"/*/metrics.jsonl
}

tests() { # those that need a GPU
    python3 -m pytest -q -n 0 -m gpu tests "$@" >"$out/tests.log" 2>&1
    tail -5 "$out/tests.log"
}

"$stage" "$@"
