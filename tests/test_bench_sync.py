"""`beam-rl bench sync`: its JSON, and that a sync takes no more memory than two buckets and the largest tensor."""

import json
import os
import subprocess
import sys

import pytest
import torch

MIB = 2**20
SLACK_BYTES = (
    40 + 3 * 22
) * MIB  # code that loads on first use; three freed tensors that malloc keeps and found no use for


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU")
def test_rates_beside_a_plain_copy_and_memory_within_two_buckets_and_the_largest_tensor() -> None:
    command = [sys.executable, "-m", "beam_rl.cli", "bench", "sync", "--bucket-bytes", str(64 * MIB), "--no-engine"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=200, env=os.environ)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    detail = result["detail"]
    assert (result["name"], result["unit"], detail["transport"]) == ("sync", "GB/s", "shm")
    assert (
        result["figure"] == detail["shm_checked_gb_per_second"] and result["limit"] == detail["shm_plain_gb_per_second"]
    )
    assert detail["bound_peak_bytes"] == (2 + 1.5) * 64 * MIB
    for transport in ("shm", "gloo"):
        assert detail[f"{transport}_checked_share_of_plain"] > 0 and detail[f"{transport}_share_of_plain"] > 0.2
        for end in ("sender", "receiver"):
            peak = detail[f"{transport}_{end}_peak_bytes"]
            assert 2 * 64 * MIB < peak < detail["bound_peak_bytes"] + SLACK_BYTES, (transport, end)
