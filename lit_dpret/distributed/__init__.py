"""Several processes or devices: ranks and their sums, where a sharded parameter lies, XLA, and shared-out work."""
