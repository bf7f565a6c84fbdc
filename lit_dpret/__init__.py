"""Dense retrieval trained on private search queries under differential privacy, and the proof of it."""

__version__ = "0.1.0"
