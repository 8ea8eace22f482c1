"""`beam-rl bench nvme`: its JSON, the same memory for four times the state, and nothing left on the disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MIB = 2**20
SLACK_BYTES = 8 * MIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU")
def test_seconds_beside_the_disks_own_and_memory_of_five_blocks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "beam_rl.cli", "bench", "nvme", "--folder", str(tmp_path), "--gigabytes", "0.2"]
    command += ["--block-bytes", str(4 * MIB), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    detail = result["detail"]
    assert (result["name"], result["unit"]) == ("nvme", "s")
    assert result["ratio"] == pytest.approx(result["limit"] / result["figure"])
    assert detail["update_over_disk"] == pytest.approx(1 / result["ratio"])
    assert 0.15e9 < detail["read_bytes"] == detail["write_bytes"] <= 0.2e9
    assert detail["serial_seconds"] > 0 and detail["disk_gb_per_second"] > 0
    assert 4 * 4 * MIB < detail["staging_bytes"] <= 5 * 4 * MIB
    for peak in (detail["quarter_peak_bytes"], detail["whole_peak_bytes"]):
        assert 0 < peak < detail["staging_bytes"] + SLACK_BYTES < detail["read_bytes"] // 4
    assert not list(tmp_path.iterdir())
