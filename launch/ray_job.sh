#!/usr/bin/env bash
# Submits a run to a Ray cluster that is there already, prints what it prints, and ends as it ends.
#
#   launch/ray_job.sh [key=value ...]              changes to the recipe
#   ray job stop --address "$RAY_API_SERVER_ADDRESS" ID   SIGTERM: the run saves and ends; submit again to go on
#
# Ctrl-C here ends the printing, not the job. Keys and tokens (HF_TOKEN, WANDB_API_KEY) belong into the nodes'
# environment: what stands here shows in Ray's dashboard.
set -euo pipefail
cd "$(dirname "$0")/.."

# 1. The cluster: where its dashboard listens. Its Ray and Python are the versions that pyproject.toml names.
export RAY_API_SERVER_ADDRESS=${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}

# 2. The run: a recipe of this checkout, and the run's folder, absolute, on a disk that all nodes share. A folder that
#    holds the run already goes on from its last checkpoint.
RECIPE=${RECIPE:-recipes/dapo_lora.yaml}
OUT=${OUT:-/shared/runs/dapo_lora}

# 3. Python on the nodes: uv builds the environment of this checkout on each node at first use (with a uv cache on the
#    nodes' disks that takes seconds); in an image that has it already: PYTHON=python
PYTHON=${PYTHON:-uv run --extra gpu python}

# ---------------------------------------------------------------------------------------------------------------------

# The checkout travels to every node without what these patterns name. Ray kills a job that it stops after 3 s unless told
# to wait; the run asks for checkpoint.grace_s, which is 25.
runtime_env=$(
  cat <<JSON
{
  "working_dir": ".",
  "excludes": [".git", ".venv", "runs", "**/__pycache__", ".*_cache"],
  "py_executable": "$PYTHON",
  "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "40", "PYTHONUNBUFFERED": "1"}
}
JSON
)

if [[ $OUT != /* ]]; then
  echo "OUT=$OUT: the job runs in a copy of this folder, so the run's folder needs an absolute path" >&2
  exit 2
fi

# shellcheck disable=SC2086 # PYTHON may be several words
exec ${RAY:-uv run --extra gpu ray} job submit --runtime-env-json "$runtime_env" -- \
  $PYTHON -m beam_rl.cli train "$RECIPE" cluster.address=auto "$@" --out "$OUT" --resume auto
