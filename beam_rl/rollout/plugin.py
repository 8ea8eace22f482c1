"""What vLLM calls in each of its processes before it loads a model (entry point `vllm.general_plugins`)."""

from beam_rl.rollout import compat, process

TRANSFER_BACKEND = "beam_rl_gloo"


def register() -> None:
    """Adds Beam where vLLM lacks it, the Gloo weight transport, and ties the process's life to its engine's."""
    from vllm import ModelRegistry

    from beam_rl.rollout.adapter import slot_rank

    compat.check_version(compat.installed()[1])
    process.follow_owner()
    if not compat.has_native_beam():
        # The class, not its name: vLLM would start another Python to look at a class that is only named.
        from beam_rl.rollout.model import BeamForCausalLM

        ModelRegistry.register_model(compat.ARCHITECTURE, BeamForCausalLM)
    compat.size_adapter_slots(slot_rank)
    compat.repair_adapter_linear()
    compat.register_transfer_engine(TRANSFER_BACKEND, "beam_rl.rollout.sync.gloo_engine", "GlooWeightReceiver")
