"""What the three paces cost and give: one JSON object of the runs named.

python benchmarks/paces.py runs/synchronous runs/one_step_off runs/asynchronous
"""

import json
import sys
from pathlib import Path


def mean(rows: list[dict], name: str) -> float:
    return float(f"{sum(row[name] for row in rows) / len(rows):.3g}")


def of_run(run: Path) -> dict[str, object]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["step"]]
    plain = [row for row in trained if not row["time/eval_s"]]  # evaluating is the same for all
    scores = {row["step"]: round(v, 3) for row in rows for k, v in row.items() if k.startswith("eval/") and "avg@" in k}
    return {
        "eval avg@k by step": scores,
        "step_s": mean(plain, "time/step_s"),
        "idle_s": mean(plain, "time/idle_s"),
        "hold_s": mean(plain, "time/hold_s"),
        "largest staleness": max(row["rollout/staleness"] for row in trained),
        "responses of several versions, a step": mean(trained, "rollout/continued"),
        "|Δlogp| of the last step": float(f"{trained[-1]['parity/abs_logprob_diff_mean']:.2g}"),
    }


if __name__ == "__main__":
    print(json.dumps({Path(run).name: of_run(Path(run)) for run in sys.argv[1:]}, indent=1))
