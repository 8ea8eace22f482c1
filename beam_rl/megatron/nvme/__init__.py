"""Adam's state off the GPU, in files on node-local NVMe or in host memory, streamed past the device block by block.

    layout     where each parameter's main copy and moments lie, and how that is cut into blocks (pure)
    disk       direct I/O between files and aligned host memory, on threads
    store      one rank's blocks: in files that survive a kill at any byte, or in host memory
    pipeline   reads, updates and writes blocks at once
    adam       an optimizer's own arithmetic, applied to one block
    optimizer  takes the place of the Adam inside Megatron's optimizers
    waiting    a file for all that a trainer has on its GPU, while engines have it

Only `optimizer` knows Megatron; nothing here knows about checkpoints' formats, recipes or runs.
"""
