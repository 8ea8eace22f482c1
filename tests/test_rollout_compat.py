"""The workarounds for vLLM are still needed, and other versions of it are refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from beam_rl.rollout import compat


@pytest.fixture(scope="module")
def faults() -> dict[str, bool]:
    program = Path(__file__).with_name("rollout_faults.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_reload_of_packed_experts_is_still_broken(faults: dict[str, bool]) -> None:
    """When this fails, `compat.plain_expert_method` has lost its reason: try vLLM's own CPU experts."""
    assert faults["reload_leaves_experts_unpacked"]


def test_chunked_prefill_of_seeded_requests_still_kills_the_cpu_engine(faults: dict[str, bool]) -> None:
    """When this fails, `compat.unseeded_while_prefilling` can go."""
    assert faults["partial_prefill_rewinds_cpu_generators"]


def test_installed_version_is_supported() -> None:
    compat.check_version(compat.installed()[1])


@pytest.mark.parametrize("other", ["0.31.2", "0.34.0", "1.0.0"])
def test_other_versions_are_refused_in_one_sentence(other: str) -> None:
    with pytest.raises(RuntimeError, match=f"vLLM {other} is installed; .* written for 0.32 and 0.33"):
        compat.check_version(other)
