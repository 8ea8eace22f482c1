"""The mathematics of RL post-training as pure functions of tensors: knows no Megatron, vLLM, Ray, file or rank."""
