"""Triton kernels for LoRA at decode on a GPU: `experts` for routed experts at their true rank, `linear` for dense layers.

Each module holds its kernels, the functions that launch them, and the same computation in plain torch to test against.
They know nothing about vLLM: tensors and numbers go in.
"""
