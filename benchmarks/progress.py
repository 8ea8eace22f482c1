"""How far runs are and what a step takes, a line each: `python benchmarks/progress.py runs/*/metrics.jsonl`."""

import json
import statistics
import sys
from pathlib import Path

SECONDS = ("step", "generate", "verify", "score", "update", "sync", "turn")


def told(path: Path) -> str:
    rows = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    trained = [row for row in rows if row["step"] > 0]
    scores = [f"{row['step']}: {v:.3f}" for row in rows for k, v in row.items() if "/avg@" in k]
    if not trained:
        return f"{path.parent.name}: no step yet; eval {', '.join(scores)}"
    late = trained[len(trained) // 2 :]
    median = {k: statistics.median(row.get(k, 0.0) for row in late) for k in late[-1]}
    seconds = ", ".join(f"{part} {median.get(f'time/{part}_s', 0.0):.2f}" for part in SECONDS)
    gap, peak = median.get("parity/abs_logprob_diff_mean", 0.0), max(r.get("memory/gpu_peak_bytes", 0) for r in trained)
    return (
        f"{path.parent.name}: {len(trained)} steps; eval {', '.join(scores)}; last rewards "
        f"{' '.join(format(row['reward/mean'], '.2f') for row in trained[-5:])}; seconds {seconds}; "
        f"{median.get('rollout/tokens_per_s', 0.0):.0f} token/s; |Δlogp| {gap:.1e}; peak {peak / 1e9:.1f} GB"
    )


for name in sys.argv[1:]:
    print(told(Path(name)), flush=True)
