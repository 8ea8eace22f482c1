#!/usr/bin/env bash
# A newcomer's path, timed: clone, first rising reward, a LoRA adapter, an answer from vLLM's server with it. On a CPU.
#
# benchmarks/first_run.sh REPOSITORY FOLDER    (about 8 minutes and 12 GB; nothing that FOLDER has not is reused)
set -euo pipefail
repository=$1 folder=$2
mkdir "$folder"
cd "$folder"
export UV_CACHE_DIR=$PWD/uv BEAM_RL_CACHE=$PWD/cache
began=$(date +%s.%N)
say() { printf '%6.1f s  %s\n' "$(echo "$(date +%s.%N) - $began" | bc)" "$*"; }
lines() { # of metrics.jsonl, while the run lives
  until [ "$(cat runs/tiny_cpu/metrics.jsonl 2>/dev/null | wc -l)" -ge "$1" ]; do
    kill -0 "$2" || exit 1
    sleep 0.5
  done
}

git clone -q "$repository" beam-rl
cd beam-rl
uv sync -q --extra cpu
say "packages installed"
uv run -q --extra cpu beam-rl train recipes/tiny_cpu.yaml >tiny_cpu.log 2>&1 &
run=$!
lines 1 $run && say "the untrained model is evaluated"
lines 6 $run && say "5 steps"
wait $run && say "50 steps: $(grep avg@8 tiny_cpu.log)"

# shellcheck disable=SC1091
. .venv/bin/activate
beam-rl train recipes/tiny_cpu_lora.yaml >lora.log 2>&1 && say "an adapter trained: $(grep avg@8 lora.log)"
beam-rl export runs/tiny_cpu_lora adapter >export.log 2>&1 && say "and exported"
model=$(python -c "import json; print(json.load(open('adapter/adapter_config.json'))['base_model_name_or_path'])")
VLLM_CPU_KVCACHE_SPACE=1 python -m vllm.entrypoints.openai.api_server --model "$model" --dtype float32 \
  --enable-lora --max-lora-rank 16 --lora-modules tiny=adapter --host 127.0.0.1 --port 8123 >serve.log 2>&1 &
server=$!
trap 'kill $server' EXIT
until curl -sf 127.0.0.1:8123/v1/models >models.json; do
  kill -0 $server || exit 1
  sleep 0.5
done
answer=$(curl -s 127.0.0.1:8123/v1/completions -H 'Content-Type: application/json' \
  -d '{"model": "tiny", "prompt": "3 +8 -5 +9 -2 +4 =", "max_tokens": 16, "temperature": 0}')
say "served: $(python -c "import json, sys; print(json.loads(sys.argv[1])['choices'][0]['text'])" "$answer")"
