"""Several processes or devices: ranks and their sums, sharded parameters, XLA, and work shared by Ray.

The package is large because three strategies (DDP, FSDP2, ZeRO) pass the gradient to their optimizers in three places,
and each needs its own checkpoint that a run on one process can read.
"""
