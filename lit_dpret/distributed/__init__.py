"""Several processes or devices: ranks and their sums, sharded parameters, XLA, and work shared by Ray.

The room is larger than its plan because three strategies (DDP, FSDP2, ZeRO) hand the gradient over in three places of
their optimizers, and each needs its own checkpoint that a run on one process can read.
"""
