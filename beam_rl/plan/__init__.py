"""What a recipe needs of its machines, before anything starts: bytes a GPU, a host and an NVMe hold, and seconds.

Parameter counts come from the real Megatron model, built on the meta device; all else is formulas of those, of the
recipe, and of a table of machines. Starts neither Ray nor an engine, and touches no GPU.
"""
