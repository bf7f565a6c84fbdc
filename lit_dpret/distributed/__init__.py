"""Several processes or devices: ranks and their sums, where a sharded parameter lies, XLA, and shared-out work.

The room is larger than its plan because three strategies (DDP, FSDP2, ZeRO) hand the gradient over in three places of
their optimizers, and each needs its own checkpoint that a run on one process can read.
"""
