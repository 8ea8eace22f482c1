"""MXFP8 (OCP Microscaling, E4M3 elements): the format, its GPU kernel, and which of Beam's weights have it.

Plain torch and Triton: knows nothing about Megatron, vLLM or Ray.
"""

BLOCK = 32  # elements that share a scale
