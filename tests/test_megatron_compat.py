"""The remedies for Megatron and Bridge: bound to their versions, and reported when upstream needs them no longer."""

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import other_tiny  # makes Megatron importable
import pytest
import torch

from beam_rl.megatron import compat
from beam_rl.megatron.bridged import LLAMA3_ROPE, BridgedCheckpoint, RMSNorm


def source(module: str) -> str:
    """A module's text, without importing it."""
    parent, _, name = module.rpartition(".")
    (folder,) = importlib.import_module(parent).__path__
    return (Path(folder) / f"{name}.py").read_text()


def test_another_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"megatron-core 0.20.1 is installed, .* written for 0.19.x"):
        compat.check_versions({"megatron-core": "0.20.1", "megatron-bridge": "0.6.2"})
    with pytest.raises(RuntimeError, match=r"megatron-bridge 0.7.0 is installed"):
        compat.check_versions({"megatron-core": "0.19.2", "megatron-bridge": "0.7.0"})


def test_importing_the_package_changes_nothing() -> None:
    code = (
        "import sys, torch; before = torch.cuda.current_device; import beam_rl.megatron, beam_rl.megatron.compat as c;"
        "assert torch.cuda.current_device is before; assert not any(m.startswith('megatron') for m in sys.modules)\n"
        "try: c.require_installed()\nexcept RuntimeError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "call beam_rl.megatron.compat.install() before" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_cuda_means_the_cpu() -> None:
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.cuda.Stream().record_event().synchronize() is None


# Each of these fails on the day that upstream has fixed what compat.py works around: then remove the remedy.


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("megatron.core.pipeline_parallel.schedules", 'torch.zeros([], dtype=torch.int, device="cuda")'),
        ("megatron.core.optimizer.optimizer", "param.type() == 'torch.cuda.FloatTensor'"),
        ("megatron.core.optimizer.clip_grads", "device='cuda'"),
        ("megatron.core.transformer.moe.token_dispatcher", "cuda_dtoh_stream = torch.cuda.Stream()"),
        ("megatron.core.tensor_parallel.random", "cpu_rng_state, cuda_rng_state, cuda_rng_state_tracker"),
        ("megatron.core.transformer.moe.moe_utils", "if torch.is_tensor(tensor) and tensor.is_cuda:"),
        ("megatron.core.tensor_parallel.mappings", "all_gather(output_tensor_list, input_, group=group)"),
        (
            "megatron.core.optimizer.distrib_optimizer",
            'local_param_group_map[param] = (group_index, len(group_range["params"]) - 1)',
        ),
        ("megatron.core.models.common.language_module.language_module", "weight.data = weight.data.cuda()"),
        ("megatron.core.timers", "import wandb"),
        ("megatron.core.jit", "jit_fuser = torch.compile"),
        ("megatron.bridge.peft.lora_layers", "\nimport transformer_engine.pytorch as te\n"),
        ("megatron.bridge.__init__", "import megatron.bridge.models"),
    ],
)
def test_upstream_still_has_the_fault(module: str, fault: str) -> None:
    assert fault in source(module)


def test_bridge_still_takes_a_missing_class_for_an_installed_one() -> None:
    from megatron.bridge.utils.import_utils import safe_import_from
    from megatron.core.extensions import transformer_engine

    assert transformer_engine.HAVE_TE is False
    assert safe_import_from("megatron.core.extensions.transformer_engine", "TELinear")[1] is True
    from megatron.bridge.peft import utils

    assert utils.HAVE_TE is False


# What `bridged.py` and `compat.amend` mend of other models than Beam.


def test_bridge_still_overlooks_rope_parameters_of_a_part_of_each_head() -> None:
    bridge = BridgedCheckpoint(str(other_tiny.checkpoint("glm")))
    assert bridge.config.rope_parameters["partial_rotary_factor"] == 0.5
    provider = bridge._bridge.to_megatron_provider(load_weights=False)
    assert provider.rotary_percent != 0.5, "Bridge reads rope_parameters: `BridgedCheckpoint._set_rope` need not set it"


def test_megatron_still_has_fixed_bounds_for_llama_3s_rope() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    fixed = inspect.signature(RotaryEmbedding._apply_scaling).parameters
    assert {name: fixed[name].default for name in LLAMA3_ROPE} == LLAMA3_ROPE, (
        "Megatron's are others: LLAMA3_ROPE has to be"
    )
    taken = inspect.signature(RotaryEmbedding.__init__).parameters
    assert not LLAMA3_ROPE.keys() & taken.keys(), "Megatron takes them: `_set_rope` need not refuse other ones"


def test_megatrons_norm_for_a_cpu_still_refuses_sequence_parallelism() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = SimpleNamespace(
        layernorm_zero_centered_gamma=False,
        persist_layer_norm=False,
        sequence_parallel=True,
        memory_efficient_layer_norm=False,
        normalization="RMSNorm",
    )
    try:
        WrappedTorchNorm(config, 4)  # type: ignore[arg-type]
    except AssertionError as error:
        assert "sequence parallel" in str(error)
    else:
        pytest.fail("Megatron's norm takes sequence parallelism: `bridged.RMSNorm` is there for its rounding alone")


def test_megatrons_norm_still_rounds_once() -> None:
    x, weight = torch.randn(64, 256).bfloat16(), torch.rand(256).bfloat16() + 0.5
    config = SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=False)
    ours = RMSNorm(config, 256)
    ours.weight.data.copy_(weight)
    theirs = torch.nn.functional.rms_norm(x, (256,), weight, 1e-6)
    assert (ours(x) != theirs).any(), (
        "torch rounds as vLLM and transformers do: `bridged.RMSNorm` is there for sp alone"
    )


def test_bridge_still_lacks_names_of_single_experts_and_a_way_to_be_quiet_as_it_loads() -> None:
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

    named = "local_experts" in source("megatron.bridge.models.glm.glm45_bridge")
    assert not named, "Bridge names GLM-4.5's experts one by one: see whether `compat.amend` has to for other families"
    loading = inspect.getsource(MegatronModelBridge.load_weights_hf_to_megatron)
    shown = "self._with_progress_tracking(hf_to_megatron_tasks, description)" in loading
    assert shown, "Bridge loads without a progress bar if asked: `compat.amend` need not take it away"
