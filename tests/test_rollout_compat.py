"""The workarounds for vLLM are still needed, and other versions of it are refused."""

import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

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


def test_tokens_without_an_adapter_still_get_the_last_one_on_a_cpu(faults: dict[str, bool]) -> None:
    """When this fails, `compat.repair_adapter_linear` is there for its speed alone."""
    assert faults["base_tokens_get_the_last_adapter"]


def test_repaired_linear_gives_each_token_its_own_adapter_or_none(faults: dict[str, bool]) -> None:
    assert faults["repaired_linear_leaves_base_tokens_alone"]


def test_vllm_still_has_one_adapter_rank_for_all_layers(faults: dict[str, bool]) -> None:
    """When this fails, vLLM may size the experts' slots itself: see `compat.size_adapter_slots`."""
    assert faults["all_layers_have_the_largest_rank"]


def test_an_adapter_gets_the_least_rank_that_vllm_takes_for_it(faults: dict[str, bool]) -> None:
    assert faults["allowed_rank_is_the_least_that_fits"]


def test_vllm_still_wants_a_gpu_for_experts_with_adapters(faults: dict[str, bool]) -> None:
    """When this fails, `compat.plain_expert_method` need not hide adapters any more."""
    assert faults["adapters_choose_a_gpu_kernel_for_experts"]


def test_weights_of_an_update_that_ended_half_way_still_count_in_the_next(faults: dict[str, bool]) -> None:
    """When this fails, `compat.abandon_weight_update` need not reset the layers."""
    assert faults["half_a_reload_counts_with_the_next"]


def test_a_reload_still_loads_each_tensor_twice(faults: dict[str, bool]) -> None:
    """When this fails, `beam_rl.rollout.expert_stacks` may have lost its reason: time a sync without it."""
    assert faults["a_reload_runs_each_loader_twice"]


def test_a_stack_of_experts_is_loaded_as_they_are_one_by_one(faults: dict[str, bool]) -> None:
    assert faults["stacked_experts_are_those_loaded_one_by_one"]


def test_mxfp8_layers_still_get_new_locks_with_new_weights(faults: dict[str, bool]) -> None:
    """When this fails, `compat.keep_mxfp8_kernels` can go."""
    assert faults["mxfp8_layers_get_new_locks_with_new_weights"]


def test_drafted_tokens_still_lose_their_temperature_on_a_cpu(faults: dict[str, bool]) -> None:
    """When this fails, `compat.repair_draft_temperatures` can go."""
    assert faults["drafted_tokens_lose_their_temperature"]


def test_vllm_still_spawns_its_processes_on_a_cpu_and_in_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, `compat.fork_processes` can go, in whole or in part."""
    import ray
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils import system_utils

    assert '"VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"' in inspect.getsource(CpuPlatform.check_and_update_config)
    monkeypatch.setattr(system_utils, "is_in_ray_actor", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=""))
    for name, value in (("RAY_ADDRESS", ""), ("VLLM_WORKER_MULTIPROC_METHOD", "fork")):
        monkeypatch.setenv(name, value)
    system_utils._maybe_force_spawn()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_installed_version_is_supported() -> None:
    compat.check_version(compat.installed()[1])


@pytest.mark.parametrize("other", ["0.31.2", "0.34.0", "1.0.0"])
def test_other_versions_are_refused_in_one_sentence(other: str) -> None:
    with pytest.raises(RuntimeError, match=f"vLLM {other} is installed; .* written for 0.32 and 0.33"):
        compat.check_version(other)


@pytest.mark.parametrize("typed", ["", ": dict[str, tuple[str, str]]"])
def test_vllms_list_of_models_is_read_with_a_type_or_without(typed: str) -> None:
    source = f"OTHER = 1\nMODELS{typed} = {{'A': ('a', 'A'), **MORE, 'B': ('b', 'B')}}"
    assert compat.keys_of("MODELS", source) == {"A", "B"}
    with pytest.raises(RuntimeError, match="has no OTHER to read"):
        compat.keys_of("OTHER", source)


def test_vllms_heads_still_keep_a_packed_copy_on_a_cpu() -> None:
    """When this fails, `compat.keep_all_plain` need not touch heads: one that shares the embedding's weight follows it."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    layers = Path(spec.origin).parent / "model_executor" / "layers" / "vocab_parallel_embedding.py"
    assert "dispatch_cpu_unquantized_gemm(layer, remove_weight=False)" in layers.read_text()
