"""What vLLM calls in each of its processes before it loads a model (entry point `vllm.general_plugins`)."""

from beam_rl.rollout import compat, process

TRANSFER_BACKEND = "beam_rl"


def register() -> None:
    """Adds Beam or what its adapters need, the receiver of weight syncs, and ties the process's life to its engine's."""
    from vllm import ModelRegistry

    from beam_rl.rollout.adapter import slot_rank

    compat.check_version(compat.installed()[1])
    process.follow_owner()
    # The class, not its name: vLLM would start another Python to look at a class that is only named.
    if compat.has_native_beam():
        from beam_rl.rollout import compat_gpu
        from beam_rl.rollout.native import BeamForCausalLM as Beam

        compat_gpu.install()
        compat.keep_mxfp8_kernels()
    else:
        from beam_rl.rollout.model import BeamForCausalLM as Beam
    ModelRegistry.register_model(compat.ARCHITECTURE, Beam)
    compat.size_adapter_slots(slot_rank)
    compat.repair_adapter_linear()
    compat.repair_draft_temperatures()
    compat.register_transfer_engine(TRANSFER_BACKEND, "beam_rl.rollout.sync.vllm_receiver", "WeightReceiver")
